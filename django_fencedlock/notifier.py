"""
The thread that runs the user's code: callbacks, signal receivers and handlers of log records.

Threads that renew leases run none of it: leases would expire while it is slow.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from django.db import close_old_connections

from .threads import Worker

#: Batches of renewals wait here while a receiver is slow; those beyond it aren't reported.
MOST_RENEWALS = 1000
#: Seconds that the end of the interpreter waits for code that is due to run.
AT_EXIT = 2.0

worker = Worker("fencedlock-notifier")


def notify(function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Call `function` from the notifier's thread, after what it was given before."""
    worker.put(partial(_call, partial(function, *args, **kwargs)))


def is_behind() -> bool:
    """Whether so much is due to run that renewals aren't worth a report."""
    return worker.waiting > MOST_RENEWALS


def finish() -> None:
    """Wait a moment for what is due to run, at the interpreter's exit."""
    worker.finish(AT_EXIT)


def _call(function: Callable[[], object]) -> None:
    try:
        function()
    finally:
        # What a receiver opened. No request ends in this thread.
        close_old_connections()


os.register_at_fork(after_in_child=worker.forget_after_fork)
