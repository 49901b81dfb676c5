"""
Run a program, and end it and all its children as soon as the process that started this is gone.

Run as a script: guard.py SIGNAL PATIENCE UID GID COMMAND [ARGUMENT...]. It knows by its standard
input, a pipe that the system closes however its parent ends.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

number, patience, uid, gid = map(int, sys.argv[1:5])
another = {} if uid == os.getuid() else {"user": uid, "group": gid, "extra_groups": [gid]}


def end_with_parent() -> None:
    sys.stdin.buffer.read()
    child.send_signal(number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(patience)
    child.kill()


for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(ignored, lambda *_: None)
child = subprocess.Popen(sys.argv[5:], stdin=subprocess.DEVNULL, **another)
threading.Thread(target=end_with_parent, daemon=True).start()
child.wait()
# Whatever the program has left, be it stopped; and this process, which is of the same group.
os.killpg(0, signal.SIGKILL)
