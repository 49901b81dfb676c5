"""
What the simulator's processes have in common: they do what they are told, and tell what happens.

Commands come as lines of JSON on stdin, after one with the settings; what happened goes out as
lines of JSON on stdout. Each has the time of the system's monotonic clock, which is one for all
processes of a machine.
"""

import ctypes
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

#: Seconds that a process has left when it is wanted no more.
AT_LAST = 5.0
_PR_SET_PDEATHSIG = 1
_mouth = threading.Lock()


def say(event: str, **facts: Any) -> None:
    """Tell the simulator what happened. The keeper's thread speaks as well."""
    line = json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n"
    with _mouth:
        sys.stdout.write(line)
        sys.stdout.flush()


def begin() -> None:
    """Read the settings and set Django up."""
    from django.conf import settings

    settings.configure(**json.loads(sys.stdin.readline()))
    import django

    django.setup()


def obey(commands: Mapping[str, Callable[..., object]], at_end: Callable[[], object]) -> None:
    """Do one command after the other, until nobody is there to give them."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(waiting, at_end), daemon=True).start()
    say("ready")
    while True:
        command = waiting.get()
        commands[command.pop("do")](**command)


def _listen(waiting: queue.SimpleQueue[dict[str, Any]], at_end: Callable[[], object]) -> None:
    for line in sys.stdin:
        waiting.put(json.loads(line))
    # The simulator is gone, or done with this process, which may be in the middle of a wait.
    threading.Timer(AT_LAST, os._exit, [1]).start()
    try:
        at_end()
    finally:
        os._exit(0)


def die_with(parent: int) -> None:
    """Be killed when the simulator dies, also while standing still."""
    # A process that is stopped reads no end of stdin. Elsewhere than on Linux it is woken by the
    # system, being in a process group that its parent's death leaves alone.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("The simulator was gone before this process could start.")
