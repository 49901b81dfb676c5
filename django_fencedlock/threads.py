"""Real threads of the system, also where gevent or eventlet put greenlets in their place."""

from __future__ import annotations

import importlib
import sys
from _queue import Empty, SimpleQueue
from collections.abc import Callable
from typing import Any

__all__ = [
    "Empty",
    "SimpleQueue",
    "allocate_lock",
    "is_patched",
    "original",
    "read",
    "start",
    "write",
]

# SimpleQueue above is the C type itself: what waits on it waits in the system, whatever is patched.


def start(target: Callable[[], object]) -> None:
    """
    Run `target` in a daemon thread that no hub of greenlets can starve.

    A greenlet for a thread would only beat while the others leave it room: never, while one of
    them computes or sits in a blocking call.
    """
    original("_thread", "start_new_thread")(target, ())


def is_patched(module: str) -> bool:
    """Whether greenlets took the place of what a module of the standard library has."""
    return _patcher(module) is not None


def original(module: str, name: str) -> Any:
    """What a module of the standard library has, without greenlets."""
    patcher = _patcher(module)
    if patcher is None:
        return getattr(sys.modules.get(module) or importlib.import_module(module), name)
    if hasattr(patcher, "get_original"):
        return patcher.get_original(module, name)
    return getattr(patcher.original(module), name)


def _patcher(module: str) -> Any:
    gevent: Any = sys.modules.get("gevent.monkey")
    if gevent and gevent.is_module_patched(module):
        return gevent
    eventlet: Any = sys.modules.get("eventlet.patcher")
    patched = eventlet and eventlet.is_monkey_patched(_EVENTLET_NAMES.get(module, module))
    return eventlet if patched else None


_EVENTLET_NAMES = {"_thread": "thread"}

#: Makes a lock that knows nothing of greenlets: to be held for moments only.
allocate_lock = original("_thread", "allocate_lock")
read = original("os", "read")
write = original("os", "write")
