"""The arguments of `single_instance`, and the result of a skipped run."""

from __future__ import annotations

import difflib
import enum
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from .. import conf
from ..core.identity import Holder
from ..core.names import count_permits, example_of, shown
from ..locks import Limit

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
    limit: Limit = None
    path: bool = False
    on_conflict: OnConflict = "skip"
    blocking_timeout: float | conf.Unset = conf.UNSET
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
        if self.blocking_timeout is not conf.UNSET and self.on_conflict != "wait":
            raise ValueError(
                'blocking_timeout= is for on_conflict="wait"; here on_conflict is '
                f"{self.on_conflict!r}. Remove one of them."
            )
        if self.limit is not None and not callable(self.limit):
            count_permits("", self.limit)
        if not isinstance(self.path, bool):
            raise TypeError(
                f"path is {self.path!r}; write path=True. For a model's column of that name, write "
                f'columns={{"path": {self.path!r}}}.'
            )
        if self.path and self.limit is not None:
            raise TypeError("path= and limit= are two kinds of locks. Remove one of them.")
        if self.on_conflict == "coalesce" and self.limit is not None:
            raise ValueError(
                'on_conflict="coalesce" leaves the work to the one run that comes after the '
                "present one; with limit= there are several runs at a time. Use "
                'on_conflict="skip", "retry", "wait" or "raise".'
            )
        if self.on_conflict == "coalesce" and not self.fenced:
            raise ValueError(
                'on_conflict="coalesce" requires fenced=True: it stores triggers beside the fences.'
            )
        if self.on_backend_error == "run" and self.fenced:
            raise ValueError(
                'on_backend_error="run" runs the task without its lock, so it needs fenced=False: '
                "a fenced write needs a token."
            )

    def patience(self, alias: conf.AliasConfig) -> float:
        """Return how long a run waits for its lock in seconds, if it waits."""
        given = self.blocking_timeout
        return alias.blocking_timeout if isinstance(given, conf.Unset) else given

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
    for term in ("ttl", "max_hold", "retry_countdown"):
        if terms.get(term) is not None:
            terms[term] = conf.seconds(terms[term], term, zero=term == "retry_countdown")
    if (timeout := terms.get("blocking_timeout", conf.UNSET)) is not conf.UNSET:
        timeout = math.inf if timeout is None else timeout
        timeout = conf.seconds(timeout, "blocking_timeout", zero=True, endless=True)
        terms["blocking_timeout"] = timeout
    given = terms.get("sensitive", ())
    terms["sensitive"] = (given,) if isinstance(given, str) else tuple(given)
    return Policy(**terms)


# Arguments that do not exist

#: What a message shows of the arguments.
_FIRST = ("on_conflict", "blocking_timeout", "ttl", "backend", "max_hold", "fenced")
#: What other packages call an argument, and what to write instead.
OTHERS = {
    "timeout": "Write ttl= for how long the lock lasts, or blocking_timeout= for how long "
    'on_conflict="wait" waits.',
    "wait_timeout": 'Write blocking_timeout=, with on_conflict="wait".',
    "lock_expiry": "Write ttl=. The lock is renewed while the task runs; max_hold= limits that.",
    "expires": "Write max_hold= for how long a run may keep the lock. Expiry of messages belongs "
    "to the task: @shared_task(expires=...).",
    "raise_on_duplicate": 'Write on_conflict="raise".',
    "graceful": 'Leave it out: on_conflict="skip" is the default. on_conflict="raise" is the '
    "opposite.",
    "unlock_before_run": 'Write on_conflict="coalesce": triggers during a run become one more run.',
    **dict.fromkeys(("keys", "once", "unique_on"), 'Write a template: @single_instance("{}").'),
}
_ALONE = 'Write @single_instance alone: all arguments name the lock, and on_conflict is "skip".'


def unknown(
    what: str,
    key: str,
    value: object,
    function: Callable[..., Any],
    known: Set[str] = TERMS,
    more: str = "",
) -> TypeError:
    """Return the error of an argument that doesn't exist, with what to write instead."""
    example = example_of(function)
    if key in OTHERS:
        keys = value.get("keys") if isinstance(value, Mapping) else value
        keys = [keys] if isinstance(keys, str) else keys
        fields = [f"{{{each}}}" for each in keys] if isinstance(keys, list | tuple) else []
        text = ":".join([getattr(function, "__name__", "task"), *fields])
        hint = OTHERS[key].format(text) if fields or "{" not in OTHERS[key] else _ALONE
    elif near := nearest(key, known):
        hint = f"Did you mean {near[0]!r}?"
    elif known is TERMS and isinstance(value, str) and (key in ("id", "pk") or "{" in value):
        needs = f"Column {key!r} needs a model:"
        return TypeError(f'{needs} @single_instance(Invoice, pk="{{{example}}}").')
    else:
        hint = f"Arguments: {shown(_FIRST)} and {len(TERMS) - len(_FIRST)} more."
    return TypeError(f"{what} has no argument {key!r}{more}. {hint}")


def nearest(key: str, known: Set[str] = TERMS) -> list[str]:
    return difflib.get_close_matches(key, sorted(known), 1)


# Skipped runs


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
