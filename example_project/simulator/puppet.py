"""
The common part of the simulator's processes: execute commands, send messages.

The first line of JSON on stdin has the settings, the others have commands. Messages are lines of
JSON on stdout, with the time of the system's monotonic clock, which all processes share.
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

#: Seconds until a process ends after the simulator has closed its stdin.
AT_LAST = 5.0
_PR_SET_PDEATHSIG = 1
_writing = threading.Lock()


def say(event: str, **facts: Any) -> None:
    """Send a message to the simulator. The keeper's thread also calls this."""
    line = json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n"
    with _writing:
        sys.stdout.write(line)
        sys.stdout.flush()


def begin() -> None:
    """Read the settings, and set up Django."""
    from django.conf import settings

    settings.configure(**json.loads(sys.stdin.readline()))
    import django

    django.setup()


def obey(commands: Mapping[str, Callable[..., object]], at_end: Callable[[], object]) -> None:
    """Execute commands until stdin is closed."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(waiting, at_end), daemon=True).start()
    say("ready")
    while True:
        command = waiting.get()
        commands[command.pop("do")](**command)


def _listen(waiting: queue.SimpleQueue[dict[str, Any]], at_end: Callable[[], object]) -> None:
    for line in sys.stdin:
        waiting.put(json.loads(line))
    # The simulator has ended or closed this process, which may be waiting for a lock.
    threading.Timer(AT_LAST, os._exit, [1]).start()
    try:
        at_end()
    finally:
        os._exit(0)


def die_with(parent: int) -> None:
    """Arrange to be killed when the simulator dies, also while stopped."""
    # A stopped process doesn't notice the end of stdin. On other systems than Linux, the system
    # continues it, because its process group is orphaned.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("The simulator was gone before this process could start.")
