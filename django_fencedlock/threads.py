"""Real threads of the system, also where gevent or eventlet put greenlets in their place."""

from __future__ import annotations

import _thread
import sys
from _queue import Empty, SimpleQueue
from collections.abc import Callable
from typing import Any

__all__ = ["Empty", "SimpleQueue", "allocate_lock", "start"]

# SimpleQueue above is the C type itself: what waits on it waits in the system, whatever is patched.


def allocate_lock() -> Any:
    """A lock that knows nothing of greenlets: to be held for moments only."""
    return _original("allocate_lock")()


def start(target: Callable[[], object]) -> None:
    """
    Run `target` in a daemon thread that no hub of greenlets can starve.

    A greenlet for a thread would only beat while the others leave it room: never, while one of
    them computes or sits in a blocking call.
    """
    _original("start_new_thread")(target, ())


def _original(name: str) -> Any:
    if (gevent := sys.modules.get("gevent.monkey")) and gevent.is_module_patched("_thread"):
        return gevent.get_original("_thread", name)
    if (eventlet := sys.modules.get("eventlet.patcher")) and eventlet.is_monkey_patched("thread"):
        return getattr(eventlet.original("_thread"), name)
    return getattr(_thread, name)
