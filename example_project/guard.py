"""
Run a program, and end it and all its children as soon as the process that started this is gone.

Run as a script: guard.py SIGNAL PATIENCE UID GID DIRECTORY COMMAND [ARGUMENT...]. It knows by its
standard input, a pipe that the system closes however its parent ends. It then removes the directory
as well, if one is named.
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
    """Wait for the end of whoever started this, and end the program."""
    sys.stdin.buffer.read()
    orphaned.set()
    child.send_signal(number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(patience)
    child.kill()


def end_what_is_left() -> None:
    """Kill what the program has left, be it stopped; and see it gone."""
    until = time.monotonic() + patience
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
        while time.monotonic() < until:
            reap()
            os.killpg(child.pid, 0)
            time.sleep(0.005)


def reap() -> None:
    """Take note of those that have ended: until somebody does, they are still there."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-child.pid, os.WNOHANG)[0]:
            pass


for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(ignored, lambda *_: None)
if sys.platform == "linux":
    # Children whose parent has ended become ours; elsewhere init has them, and some time.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, **another)
threading.Thread(target=end_with_parent, daemon=True).start()
child.wait()
end_what_is_left()
if directory and orphaned.is_set():
    # Else the log is still to be read.
    shutil.rmtree(directory, ignore_errors=True)
# At once: the other thread may be reading still.
os._exit(0)
