"""What a task returns that didn't run."""

from __future__ import annotations

from typing import Any

from ..core.identity import Holder
from ..exceptions import LockNotAcquired

# Why a task didn't run: see `SkippedRun`.
HELD = "held"
COALESCED = "coalesced"
SERVED = "served"
FINISHED = "finished"
GIVEN_UP = "given up"

REASONS = (HELD, COALESCED, SERVED, FINISHED, GIVEN_UP)

_MARK = "fencedlock_skipped"


class SkippedRun(dict[str, Any]):
    """
    The result of a task that didn't run, since another run of it did.

    A plain dict once it came through a result backend; `SkippedRun.of()` makes one of that again.

    Attributes:
        reason: ``"held"`` (somebody else has the lock), ``"coalesced"`` (a run that comes after
            the present one does the work), ``"served"`` (that run has been, or is on its way),
            ``"finished"`` (an earlier delivery of the message did it) or ``"given up"`` (the
            message was delivered again and again, and each of its runs was killed).
        lock: The name of the lock.
        holder: Who has it, in words; None if it can't be told.
        token: The holder's token, if it has one.
        since: When the holder got the lock, in ISO format, if that is known.
    """

    @classmethod
    def made(cls, lock: str, reason: str, holder: Holder | None = None) -> SkippedRun:
        """Make the result for a task that found `holder`."""
        since = holder.acquired_at if holder is not None else None
        return cls(
            {
                _MARK: True,
                "lock": lock,
                "reason": reason,
                "holder": None if holder is None else str(holder),
                "token": None if holder is None else holder.token,
                "since": None if since is None else since.isoformat(),
            }
        )

    @classmethod
    def of(cls, result: object) -> SkippedRun | None:
        """Tell a skipped run from any other result; None if the task ran."""
        return cls(result) if isinstance(result, dict) and result.get(_MARK) is True else None

    @property
    def lock(self) -> str:
        return str(self["lock"])

    @property
    def reason(self) -> str:
        return str(self["reason"])

    @property
    def holder(self) -> str | None:
        return self["holder"]  # type: ignore[no-any-return]

    @property
    def token(self) -> int | None:
        return self["token"]  # type: ignore[no-any-return]

    @property
    def since(self) -> str | None:
        return self["since"]  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        by = f", held by {self.holder}" if self.holder else ""
        return f"<SkippedRun {self.lock!r}: {self.reason}{by}>"


def skipped(refusal: LockNotAcquired) -> SkippedRun:
    """The result for a task that was refused its lock."""
    return SkippedRun.made(str(refusal.name), HELD, refusal.holder)
