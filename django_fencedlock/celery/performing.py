"""The course of one run: its lock, its body, and what is done when either isn't to be had."""

from __future__ import annotations

import logging
from typing import Any

from ..exceptions import AliasConflict, BackendUnavailable, LockNotAcquired
from ..lease import Lease
from . import aborting, conflicts
from .bookkeeping import Bookkeeping
from .runs import Run
from .skipped import SkippedRun

logger = logging.getLogger(__name__)


def perform(run: Run) -> Any:
    """Take the lock, run the body, give the lock back."""
    with run.shield, run.announced():
        try:
            return _perform(run, Bookkeeping(run))
        finally:
            run.give_back_left_over()


def _perform(run: Run, books: Bookkeeping) -> Any:
    try:
        found = books.before() or _acquire(run, books)
    except AliasConflict:
        # Two lock services on one name: an error of the settings, and no conflict of runs.
        raise
    except LockNotAcquired as refusal:
        return conflicts.answer(run, refusal)
    except BackendUnavailable as exc:
        if run.policy.on_backend_error != "run":
            raise
        logger.error(
            "%s runs without its lock %r: %s",
            run.title,
            run.name,
            exc,
            extra=run.facts(reason=str(exc)),
        )
        run.tell_bypassed(str(exc))
        with run.running():
            return aborting.call(run.call)
    return _hold(run, found, books) if isinstance(found, Lease) else _nothing(run, found)


def _acquire(run: Run, books: Bookkeeping) -> Lease | str:
    """Get the lock, or tell why there is no need to."""
    while True:
        try:
            return run.acquire(books.refused)
        except AliasConflict:
            raise
        except LockNotAcquired as refusal:
            why = books.lost(refusal)
        if why is not None:
            return why


def _hold(run: Run, lease: Lease, books: Bookkeeping) -> Any:
    try:
        why = books.won()
        result = _nothing(run, why) if why is not None else _body(run, lease, books)
    finally:
        run.give_back(lease)
        books.released()
    run.raise_loss(lease)
    return result


def _body(run: Run, lease: Lease, books: Bookkeeping) -> Any:
    error: BaseException | None = None
    try:
        with run.entered(lease):
            result = aborting.run(lease, run.call) if run.aborts else aborting.call(run.call)
        run.raise_loss(lease)
        return result
    except BaseException as exc:
        error = exc
        raise
    finally:
        books.ended(error)


def _nothing(run: Run, why: str) -> SkippedRun:
    return SkippedRun.made(run.name, why)
