"""What is wrong with the tasks under `single_instance`, seen in their policies and in Celery's."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from celery import Celery

from .. import conf
from ..conf import Problem
from ..core import runtime
from ..exceptions import SettingsError
from . import interrupts
from .coalesce import PICKLES, serializer_of
from .names import single_of
from .policy import Policy

#: Brokers that deliver a message again which isn't acknowledged in time, and after how long.
VISIBILITY_TIMEOUTS = {
    **dict.fromkeys(("redis", "rediss", "sentinel"), 3600.0),
    **dict.fromkeys(("pgmq", "slmq", "sqs"), 1800.0),
}
#: Pools that let a task run on beyond these limits.
IGNORED_LIMITS = {
    "gevent": ("soft_time_limit",),
    "solo": ("soft_time_limit", "time_limit"),
    "thread": ("soft_time_limit", "time_limit"),
}
#: Requests in vain that a ttl should outlast: the keeper sends the first after a third of it.
REQUESTS = 3


def problems(apps: Iterable[Celery]) -> Iterator[Problem]:
    """What is wrong with the tasks of these apps that are under `single_instance`."""
    found: dict[Problem, list[str]] = {}
    for app in apps:
        for case in _cases(app):
            for look in _LOOKS:
                for problem in look(case):
                    names = found.setdefault(problem, [])
                    # A shared task is a task of every app.
                    if case.task.name not in names:
                        names.append(case.task.name)
    for problem, names in found.items():
        yield replace(problem, message=f"{_told(names)}: {problem.message}")


@dataclass(frozen=True)
class _Case:
    """A task, and what is known of where it runs."""

    app: Any
    task: Any
    policy: Policy

    @property
    def alias(self) -> conf.AliasConfig | None:
        """The settings of its alias; None if they can't be followed, of which others tell."""
        try:
            return conf.config(self.policy.backend)
        except SettingsError:
            return None

    @property
    def ttl(self) -> float | None:
        return self.policy.ttl or (self.alias.ttl if self.alias else None)

    @property
    def patience(self) -> float | None:
        """How long the task waits for its lock."""
        if self.policy.on_conflict != "wait" or self.alias is None:
            return None
        timeout = self.policy.blocking_timeout
        return self.alias.blocking_timeout if timeout is None else timeout

    def setting(self, name: str) -> Any:
        """What the task says, or else its app."""
        own = getattr(self.task, name, None)
        return getattr(self.app.conf, f"task_{name}") if own is None else own

    @property
    def limits(self) -> dict[str, float]:
        """The time limits that it has."""
        given = {name: self.setting(name) for name in ("soft_time_limit", "time_limit")}
        return {name: float(limit) for name, limit in given.items() if limit}

    @property
    def pool(self) -> str:
        """The worker's pool by the settings; the command line of a worker may name another."""
        name = str(self.app.conf.worker_pool or "").partition(":")[0].rpartition(".")[2]
        return "thread" if name == "threads" else name

    @property
    def visibility_timeout(self) -> float | None:
        """After how long the broker delivers again what isn't acknowledged; None if it doesn't."""
        transport, options = _broker(self.app)
        default = VISIBILITY_TIMEOUTS.get(transport)
        given = options.get("visibility_timeout")
        return default if default is None or not given else float(given)


def _broker(app: Celery) -> tuple[str, dict[str, Any]]:
    try:
        connection = app.connection_for_read()
    except Exception:
        # A URL that Celery can't read either.
        return "", {}
    return str(connection.transport_cls or "").lower(), dict(connection.transport_options or {})


def _alias(case: _Case) -> Iterator[Problem]:
    if conf.lacks(case.policy.backend):
        yield Problem(
            "E030",
            f"backend={case.policy.backend!r} is no alias in FENCEDLOCK.",
            conf.unknown(case.policy.backend, conf.aliases()),
        )


def _pickles(case: _Case) -> Iterator[Problem]:
    if case.policy.on_conflict == "coalesce" and serializer_of(case.task) in PICKLES:
        yield Problem(
            "E031",
            'on_conflict="coalesce" keeps arguments in the database, and no pickles: whoever can '
            "write there could run anything.",
            'Give the task another serializer, such as "json".',
        )


def _redelivered_while_it_runs(case: _Case) -> Iterator[Problem]:
    # What is acknowledged before it runs isn't delivered again.
    visible = case.visibility_timeout
    if visible is None or not case.setting("acks_late"):
        return
    runs, ttl = case.limits.get("time_limit") or case.limits.get("soft_time_limit"), case.ttl
    for what, length in (("time limit", runs), ("ttl", ttl)):
        if length is not None and length > visible:
            yield Problem(
                "W030",
                f"acks_late with a {what} of {length:g} s, and a broker that delivers again what "
                f"isn't acknowledged within {visible:g} s.",
                f"Set broker_transport_options['visibility_timeout'] to more than {length:g}, or "
                f"shorten the {what}.",
            )


def _redelivered_while_it_waits(case: _Case) -> Iterator[Problem]:
    visible, policy = case.visibility_timeout, case.policy
    if visible is None or policy.on_conflict != "retry" or not policy.max_conflict_retries:
        return
    pause = policy.pause(policy.max_conflict_retries - 1)
    if pause > visible:
        yield Problem(
            "W031",
            f"pauses of up to {pause:g} s between conflicts, and a broker that delivers again what "
            f"isn't acknowledged within {visible:g} s: a worker that waits for the time of a "
            "message has not acknowledged it.",
            "Lower retry_countdown (pauses grow to twelve times of it), or raise "
            "broker_transport_options['visibility_timeout'].",
        )


def _limits_of_no_effect(case: _Case) -> Iterator[Problem]:
    if case.policy.max_hold is not None:
        return
    for name in IGNORED_LIMITS.get(case.pool, ()):
        if name in case.limits:
            yield Problem(
                "W032",
                f"{name} of {case.limits[name]:g} s, which the pool {case.app.conf.worker_pool!r} "
                "ignores: a run that hangs keeps its lock.",
                "Give max_hold, after which the lock isn't renewed any more, or use another pool.",
            )


def _short_ttl(case: _Case) -> Iterator[Problem]:
    if case.alias is None or case.ttl is None:
        return
    if "TIMEOUT" not in conf.backend_class(case.alias.backend).option_names:
        return
    timeout = case.alias.timeout
    if case.ttl < REQUESTS * timeout:
        yield Problem(
            "W033",
            f"ttl of {case.ttl:g} s, and a lock service that may take {timeout:g} s to answer: one "
            "renewal that hangs, and there is no time for another.",
            f"Make the ttl at least {REQUESTS * timeout:g} s, or lower "
            f"{case.alias.where('OPTIONS')}['TIMEOUT'].",
        )


def _long_wait(case: _Case) -> Iterator[Problem]:
    obeyed = [
        limit
        for name, limit in case.limits.items()
        if name not in IGNORED_LIMITS.get(case.pool, ())
    ]
    if obeyed and case.patience is not None and case.patience >= min(obeyed):
        yield Problem(
            "W034",
            f"waits up to {case.patience:g} s for its lock, and has a time limit of "
            f"{min(obeyed):g} s: who waited has no time left to run.",
            'Shorten blocking_timeout, or use on_conflict="retry", which keeps no worker busy.',
        )


def _short_hold(case: _Case) -> Iterator[Problem]:
    if case.policy.max_hold is not None and case.ttl and case.policy.max_hold < case.ttl:
        yield Problem(
            "W035",
            f"max_hold of {case.policy.max_hold:g} s, and a ttl of {case.ttl:g} s, for which the "
            "lock is granted in any case.",
            "Make the ttl the shorter one.",
        )


def _lost_with_its_worker(case: _Case) -> Iterator[Problem]:
    # The app's setting may be meant for those of its tasks that acknowledge late.
    if (
        case.task.reject_on_worker_lost
        and not case.app.conf.task_reject_on_worker_lost
        and not case.setting("acks_late")
    ):
        yield Problem(
            "W036",
            "reject_on_worker_lost without acks_late has no effect: the message of a run that was "
            "killed is gone, and so is its work.",
            "Give acks_late=True as well.",
        )


def _skipped_for_the_dead(case: _Case) -> Iterator[Problem]:
    policy = case.policy
    if policy.redelivery == "run" and policy.on_conflict == "skip" and case.setting("acks_late"):
        yield Problem(
            "W037",
            'redelivery="run" and on_conflict="skip" with acks_late: when a worker dies, its '
            "message is delivered again while the dead run's lock still lasts, is skipped, and so "
            "is lost.",
            'Leave redelivery at "defer", or use on_conflict="retry".',
        )


def _taken_signal(case: _Case) -> Iterator[Problem]:
    if case.policy.on_lost != "abort":
        return
    try:
        number = conf.abort_signal()
    except SettingsError:
        return
    found = signal.getsignal(number)
    if found not in (signal.SIG_DFL, interrupts.on_signal):
        yield Problem(
            "W038",
            f'on_lost="abort" interrupts a body by signal {int(number)}, which has the handler '
            f"{found!r} in this process.",
            "Set FENCEDLOCK_ABORT_SIGNAL to a signal that nobody uses.",
        )


def _no_abort_under_gevent(case: _Case) -> Iterator[Problem]:
    if case.policy.on_lost != "abort":
        return
    if case.pool == "gevent" or runtime.is_patched("_thread"):
        yield Problem(
            "W039",
            'on_lost="abort" can\'t interrupt a greenlet: under gevent it is the same as "raise".',
            'Use another pool, or on_lost="raise" with lease.check() between the steps of the '
            "body.",
        )


def _unseen_skips(case: _Case) -> Iterator[Problem]:
    if case.policy.on_conflict == "skip" and case.setting("ignore_result"):
        yield Problem(
            "I030",
            "a run that is skipped tells so by its result alone, and results are ignored.",
            "Nothing is wrong if nobody asks. Else keep the result, or listen to the signal "
            "lock_not_acquired.",
        )


_LOOKS: tuple[Callable[[_Case], Iterator[Problem]], ...] = (
    _alias,
    _pickles,
    _redelivered_while_it_runs,
    _redelivered_while_it_waits,
    _limits_of_no_effect,
    _short_ttl,
    _long_wait,
    _short_hold,
    _lost_with_its_worker,
    _skipped_for_the_dead,
    _taken_signal,
    _no_abort_under_gevent,
    _unseen_skips,
)


def _cases(app: Celery) -> Iterator[_Case]:
    for task in app.tasks.values():
        single = single_of(task)
        if single is not None:
            yield _Case(app, task, single.policy)


def _told(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"Task{'s' if len(names) > 1 else ''} {shown}{more}"


#: Tasks that one message names.
_SHOWN = 5
