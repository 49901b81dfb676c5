"""The arguments of `single_instance`, and the result of a skipped run."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from .. import conf
from ..core.identity import Holder

OnConflict = Literal["skip", "retry", "wait", "raise", "coalesce"]
OnLost = Literal["raise", "abort", "ignore"]
OnBackendError = Literal["raise", "run"]
OnRedelivery = Literal["defer", "run"]

#: The pauses between tries double, up to this multiple of the first.
LONGEST_PAUSE = 12
#: About half an hour of tries, with the first pause of 5 s.
MAX_CONFLICT_RETRIES = 60

_MARK = "fencedlock_skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The arguments of `single_instance`, checked."""

    backend: str = conf.DEFAULT_ALIAS
    ttl: float | None = None
    fenced: bool = True
    on_conflict: OnConflict = "skip"
    blocking_timeout: float | None = None
    retry_countdown: float = 5.0
    max_conflict_retries: int = MAX_CONFLICT_RETRIES
    on_lost: OnLost = "raise"
    max_hold: float | None = None
    redelivery: OnRedelivery = "defer"
    on_backend_error: OnBackendError = "raise"
    sensitive: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for argument, allowed in _CHOICES.items():
            if (given := getattr(self, argument)) not in allowed:
                raise ValueError(
                    f"{argument} is {given!r}; it must be one of {', '.join(map(repr, allowed))}."
                )
        retries = self.max_conflict_retries
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ValueError(
                f"max_conflict_retries is {retries!r}; it must be a whole number, zero or more. "
                "A task that tries without end never fails visibly."
            )
        if self.blocking_timeout is not None and self.on_conflict != "wait":
            raise ValueError(
                f'blocking_timeout={self.blocking_timeout:g} is for on_conflict="wait"; here '
                f"on_conflict is {self.on_conflict!r}."
            )
        if self.on_conflict == "coalesce" and not self.fenced:
            raise ValueError(
                'on_conflict="coalesce" stores its triggers in the database, beside the fences, so '
                "it doesn't work with fenced=False."
            )
        if self.on_backend_error == "run" and self.fenced:
            raise ValueError(
                'on_backend_error="run" runs the task without its lock, so it needs fenced=False: '
                "a fenced write needs a token."
            )

    def pause(self, tries: int) -> float:
        """Return the longest pause before the next try, after `tries` refusals."""
        # 2.0 ** 1024 raises OverflowError.
        return self.retry_countdown * min(2.0 ** min(tries, LONGEST_PAUSE), LONGEST_PAUSE)


_CHOICES = {
    "on_conflict": get_args(OnConflict),
    "on_lost": get_args(OnLost),
    "on_backend_error": get_args(OnBackendError),
    "redelivery": get_args(OnRedelivery),
}

#: What `single_instance` takes beside a name; its other arguments are for a model's lock.
TERMS = frozenset(each.name for each in fields(Policy))


def policy(**terms: Any) -> Policy:
    for term in ("ttl", "max_hold", "blocking_timeout", "retry_countdown"):
        if terms.get(term) is not None:
            zero = term in ("blocking_timeout", "retry_countdown")
            terms[term] = conf.seconds(terms[term], term, zero=zero)
    given = terms.get("sensitive", ())
    terms["sensitive"] = (given,) if isinstance(given, str) else tuple(given)
    return Policy(**terms)


class Skip(enum.StrEnum):
    """Why a task didn't run: see `SkippedRun`."""

    HELD = "held"
    COALESCED = "coalesced"
    SERVED = "served"
    FINISHED = "finished"
    GIVEN_UP = "given up"


class SkippedRun(dict[str, Any]):
    """
    The result of a task that didn't run, since another run of it did.

    A result backend returns it as a plain dict; `SkippedRun.of()` converts that.

    The reason is ``"held"`` (another holder has the lock), ``"coalesced"`` (a run after the present
    one does the work), ``"served"`` (that run has ended, or is on its way), ``"finished"`` (an
    earlier delivery of the message did the work) or ``"given up"`` (each of its runs was killed).
    """

    lock: str
    reason: str
    #: A description of the holder, and its token, if they are known.
    holder: str | None
    token: int | None
    #: When the holder acquired the lock, in ISO format, if that is known.
    since: str | None

    @classmethod
    def made(cls, lock: str, reason: Skip, holder: Holder | None = None) -> SkippedRun:
        """Make the result of a task that found `holder`."""
        since = holder and holder.acquired_at
        facts: dict[str, object] = {_MARK: True, "lock": lock, "reason": reason.value}
        facts |= {"holder": holder and str(holder), "token": holder and holder.token}
        return cls(facts, since=since and since.isoformat())

    @classmethod
    def of(cls, result: object) -> SkippedRun | None:
        """Return the skipped run of a task's result; None if the task ran."""
        return cls(result) if isinstance(result, dict) and result.get(_MARK) is True else None

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)

    def __repr__(self) -> str:
        by = f", held by {self.holder}" if self.holder else ""
        return f"<SkippedRun {self.lock!r}: {self.reason}{by}>"
