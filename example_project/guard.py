"""
Run a program, and end it and all its children when this script's parent process ends.

Run as a script: guard.py SIGNAL PATIENCE UID GID DIRECTORY COMMAND [ARGUMENT...]. It notices
that by its standard input, a pipe that the system closes when the parent ends for any reason. It
then also removes the directory, if one is given.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

number, patience, uid, gid = map(int, sys.argv[1:5])
PR_SET_CHILD_SUBREAPER = 36
orphaned = threading.Event()
directory, *command = sys.argv[5:]
another = {} if uid == os.getuid() else {"user": uid, "group": gid, "extra_groups": [gid]}


def end_with_parent() -> None:
    """Wait until the parent process ends, and end the program."""
    sys.stdin.buffer.read()
    orphaned.set()
    child.send_signal(number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(patience)
    child.kill()


def end_what_is_left() -> None:
    """Kill all remaining children, including stopped ones, and wait for their end."""
    until = time.monotonic() + patience
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
        while time.monotonic() < until:
            reap()
            os.killpg(child.pid, 0)
            time.sleep(0.005)


def reap() -> None:
    """Reap ended children. Until then they remain as zombies."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-child.pid, os.WNOHANG)[0]:
            pass


for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(ignored, lambda *_: None)
if sys.platform == "linux":
    # Adopt orphaned children. On other systems init adopts them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, **another)
threading.Thread(target=end_with_parent, daemon=True).start()
child.wait()
end_what_is_left()
if directory and orphaned.is_set():
    # Otherwise the parent still reads the log.
    shutil.rmtree(directory, ignore_errors=True)
# Not sys.exit(): the other thread may still be reading.
os._exit(0)
