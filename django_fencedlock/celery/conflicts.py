"""What a run does that didn't get its lock."""

from __future__ import annotations

import random
from typing import Any

from celery.exceptions import Reject, Retry

from ..exceptions import LockNotAcquired
from .messages import CONFLICTS, again, number, publish_copy
from .redelivery import nonce
from .runs import Run
from .skipped import skipped


def answer(run: Run, refusal: LockNotAcquired) -> Any:
    """Do as the policy says: return what the task returns, or raise."""
    if run.policy.on_conflict == "skip":
        return skipped(refusal)
    if run.policy.on_conflict == "retry" and not run.is_called_directly:
        come_again(run, refusal)
    raise refusal


def come_again(run: Run, refusal: LockNotAcquired) -> None:
    """Publish the task's next try and raise Celery's `Retry`; return if there were enough."""
    tries = number(run.request, CONFLICTS)
    if tries >= run.policy.max_conflict_retries or run.is_nested:
        return
    countdown = random.uniform(0, run.policy.pause(tries))
    following = again(run.task, run.request, countdown=countdown, headers={CONFLICTS: tries + 1})
    if not run.request.is_eager:
        try:
            # The same message still: another delivery of it may be about, or come.
            publish_copy(following, nonce(run.request, run.title))
        except Exception as exc:
            # As Celery does: the broker is to put it where dead letters go.
            raise Reject(exc, requeue=False) from exc
    raise Retry(
        str(refusal),
        exc=refusal,
        when=countdown,  # type: ignore[arg-type]
        is_eager=run.request.is_eager,
        sig=following,
    )
