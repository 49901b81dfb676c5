"""What a task does when it doesn't get its lock, or loses it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from .. import conf

OnConflict = Literal["skip", "retry", "wait", "raise", "coalesce"]
OnLost = Literal["raise", "abort", "ignore"]
OnBackendError = Literal["raise", "run"]
OnRedelivery = Literal["defer", "run"]

#: The pauses between tries double up to so many times the first.
LONGEST_PAUSE = 12
#: About half an hour of tries, with the first pause of 5 s.
MAX_CONFLICT_RETRIES = 60


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
            _one_of(argument, getattr(self, argument), allowed)
        retries = self.max_conflict_retries
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ValueError(
                f"max_conflict_retries is {retries!r}; it has to be a whole number, zero or more: "
                "a task that tried for ever would never fail where somebody sees it."
            )
        if self.blocking_timeout is not None and self.on_conflict != "wait":
            raise ValueError(
                f'blocking_timeout={self.blocking_timeout:g} is for on_conflict="wait"; here '
                f"on_conflict is {self.on_conflict!r}."
            )
        if self.on_conflict == "coalesce" and not self.fenced:
            raise ValueError(
                'on_conflict="coalesce" keeps its triggers in the database, beside the fences; it '
                "can't be had with fenced=False."
            )
        if self.on_backend_error == "run" and self.fenced:
            raise ValueError(
                'on_backend_error="run" lets the task run without its lock, so it can only be had '
                "with fenced=False: a fenced write needs a token."
            )

    def pause(self, tries: int) -> float:
        """The longest pause before the next try, when there were `tries` in vain."""
        # A float has no room for twice two to the power of 1023.
        return self.retry_countdown * min(2.0 ** min(tries, LONGEST_PAUSE), LONGEST_PAUSE)


_CHOICES = {
    "on_conflict": get_args(OnConflict),
    "on_lost": get_args(OnLost),
    "on_backend_error": get_args(OnBackendError),
    "redelivery": get_args(OnRedelivery),
}


#: What `single_instance` takes beside a name; whatever else it is given is for a model's lock.
TERMS = frozenset(each.name for each in fields(Policy))


def policy(**terms: Any) -> Policy:
    """Check the arguments of `single_instance`."""
    for term in ("ttl", "max_hold"):
        if terms.get(term) is not None:
            terms[term] = conf.seconds(terms[term], term)
    given = terms.get("sensitive", ())
    terms["sensitive"] = (given,) if isinstance(given, str) else tuple(given)
    for term in ("blocking_timeout", "retry_countdown"):
        if terms.get(term) is not None:
            terms[term] = conf.seconds(terms[term], term, zero=True)
    return Policy(**terms)


def _one_of(argument: str, given: object, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ValueError(
            f"{argument} is {given!r}; it has to be one of {', '.join(map(repr, allowed))}."
        )
