"""
Become the server user, promise to die with the parent, and turn into the server.

Run as a script: launch.py PARENT_PID UID GID COMMAND [ARGUMENT...]. A script of its own rather than
a preexec_fn: the test process has threads, and Python warns about forking one that does.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

parent, uid, gid = map(int, sys.argv[1:4])
command = sys.argv[4:]

if uid != os.getuid():
    os.setgroups([gid])
    os.setgid(gid)
    os.setuid(uid)

if sys.platform == "linux":
    # Changing the uid clears this, so it comes after.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("The parent was gone before the server could start.")

os.execv(command[0], command)
