"""Real threads of the system, also where gevent put greenlets in their place."""

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
    "start",
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
    gevent: Any = sys.modules.get("gevent.monkey")
    return bool(gevent and gevent.is_module_patched(module))


def original(module: str, name: str) -> Any:
    """What a module of the standard library has, without greenlets."""
    if is_patched(module):
        return sys.modules["gevent.monkey"].get_original(module, name)
    return getattr(sys.modules.get(module) or importlib.import_module(module), name)


#: Makes a lock that knows nothing of greenlets: to be held for moments only.
allocate_lock = original("_thread", "allocate_lock")
