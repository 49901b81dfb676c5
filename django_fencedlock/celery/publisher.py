"""
Postpone a message whose own publisher still holds its lock.

A body publishes its retry, its replacement and the steps of a workflow while it holds its lock, and
an idle worker may take them at once. To follow ``on_conflict`` then would skip the work: the
conflict is none.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core.identity import Holder
from ..exceptions import BackendUnavailable
from .messages import FOLLOWS, POSTPONED, again, number, postpone
from .redelivery import nonce

if TYPE_CHECKING:
    from .runs import Run

#: Seconds until a postponed message comes again: at first, and at most. They double each time.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0


def postpone_until_end(run: Run, seen: Sequence[Holder]) -> None:
    """
    Postpone the run if its lock is held by the run that published its message.

    To be called when the lock was refused. A publisher that has released the lock never holds it
    again, so once another holder is known the refusal is an ordinary conflict.

    Raises:
        Ignore: A copy of the message was published, which comes a moment later.
    """
    if run.is_called_directly or run.request.is_eager:
        return
    publisher = (run.request.headers or {}).get(FOLLOWS)
    if not publisher:
        return
    holder = seen[0] if seen else _holder(run)
    # Nobody now, or a holder that the service can't name: it may have been the publisher.
    if holder is not None and holder.owner not in ("", publisher):
        return
    times = max(0, number(run.request, POSTPONED))
    pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(times, 16))
    countdown = pause * random.uniform(0.5, 1.0)
    copy = again(run.task, run.request, countdown=countdown, headers={POSTPONED: times + 1})
    why = f"the run that published the message still holds lock {run.name!r}"
    postpone(run.task, copy, nonce(run.request, run.title), why)


def _holder(run: Run) -> Holder | None:
    try:
        return run.service.holder(run.name)
    except BackendUnavailable:
        return None
