"""What is written down about a run, and what that tells the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core.identity import Holder
from ..exceptions import LockNotAcquired
from . import publisher
from .coalescing import Coalescing
from .outcomes import outcome
from .redelivery import Conflict, Redelivery

if TYPE_CHECKING:
    from .runs import Run


class Bookkeeping:
    """
    The records of one run: of its message, and of the triggers that it covers.

    Steps that return a text tell by it why there is nothing to run; with None one goes on.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._redelivery = Redelivery(run)
        self._coalescing: Coalescing | None = None
        if run.policy.on_conflict == "coalesce" and run.task and run.service.backend.excludes:
            self._coalescing = Coalescing(run, self._redelivery)
        #: Whether the run leaves in good order, so that it can look after the others.
        self._is_over = False

    def before(self) -> str | None:
        """To be called before the lock is asked for."""
        return self._coalescing.before() if self._coalescing else None

    def refused(self, seen: Sequence[Holder]) -> None:
        """
        To be called with the holder, if it is known, when the first try for the lock was refused.

        Raises:
            Ignore: The message has been postponed.
        """
        publisher.postpone_until_end(self._run, seen)
        if self._run.policy.on_conflict == "wait":
            self._redelivery.before_waiting(seen)

    def lost(self, refusal: LockNotAcquired) -> str | None:
        """
        To be called when somebody has the lock; None if it is to be tried again at once.

        Raises:
            LockNotAcquired: `refusal` itself, where the records have no answer to it.
            Ignore: The message has been put off, or is done.
        """
        found = self._redelivery.conflict(refusal.holder)
        if found is Conflict.GONE:
            return None
        if isinstance(found, str):
            return found
        if self._coalescing is None:
            raise refusal
        return self._coalescing.lost()

    def won(self) -> str | None:
        """To be called with the lock, before the body; may give the run other arguments."""
        try:
            why = self._coalescing.won() if self._coalescing else self._redelivery.begin()
        except Exception:
            self._is_over = True
            raise
        self._is_over = why is not None
        return why

    def ended(self, error: BaseException | None) -> None:
        """To be called when the body has ended, before the lock is given back."""
        found = outcome(error, self._run.task, self._run.request)
        self._is_over = bool(found)
        # First the one, then the other: died in between, the message finds nothing to do.
        if self._coalescing:
            self._coalescing.ended(found)
        self._redelivery.ended(found)

    def released(self) -> None:
        """
        To be called after the lock was given back, whether or not there was something to run.

        Who was refused meanwhile relies on it. Does nothing if the run is being killed.
        """
        if self._coalescing and self._is_over:
            self._coalescing.released()
