"""System checks of tasks under `single_instance`."""

from __future__ import annotations

import contextlib
import math
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from celery import Celery

from .. import conf
from ..conf import Problem
from ..core import names, runtime
from ..exceptions import SettingsError
from . import interrupts
from .names import Single, single_of
from .policy import Policy

#: Seconds after which brokers deliver again what isn't acknowledged.
VISIBILITY_TIMEOUTS = {
    **dict.fromkeys(("redis", "rediss", "sentinel"), 3600.0),
    **dict.fromkeys(("pgmq", "slmq", "sqs"), 1800.0),
}
#: The time limits that pools ignore.
IGNORED_LIMITS = {
    "gevent": ("soft_time_limit",),
    "solo": ("soft_time_limit", "time_limit"),
    "thread": ("soft_time_limit", "time_limit"),
}
#: Failed requests that a ttl should outlast: the keeper sends the first after a third of it.
REQUESTS = 3


def problems(apps: Iterable[Celery]) -> Iterator[Problem]:
    """Return the problems of the tasks of these apps."""
    # A shared task is a task of every app.
    found: defaultdict[Problem, set[str]] = defaultdict(set)
    for app in apps:
        for task in app.tasks.values():
            if single := single_of(task):
                for problem in _task_problems(app, task, single):
                    found[problem].add(task.name)
    for problem, tasks in found.items():
        what = f"Task{'s' if len(tasks) > 1 else ''} {names.shown(sorted(tasks))}"
        yield replace(problem, message=f"{what}: {problem.message}")


def _task_problems(app: Celery, task: Any, single: Single) -> Iterator[Problem]:
    try:
        # Looks up a model that is named by its label.
        single.pattern()
        policy = single.policy
    except SettingsError as exc:
        yield Problem("E032", str(exc), "Each run of the task fails with this error.")
        return
    if conf.lacks(policy.backend):
        yield Problem(
            "E030",
            f"backend={policy.backend!r} is no alias in FENCEDLOCK.",
            conf.unknown(policy.backend, conf.aliases()),
        )
    # Settings that can't be read are reported by their own check.
    with contextlib.suppress(SettingsError):
        case = _Case(app, task, policy, conf.config(policy.backend))
        for check in (_arguments, _redeliveries, _times, _aborts):
            yield from check(case)


class _Case:
    """A task, its app, its policy and its alias."""

    def __init__(self, app: Any, task: Any, policy: Policy, alias: conf.AliasConfig) -> None:
        self.app, self.task, self.policy, self.alias = app, task, policy, alias
        self.ttl = policy.ttl or alias.ttl
        limits = {name: self.setting(name) for name in ("soft_time_limit", "time_limit")}
        self.limits = {name: float(limit) for name, limit in limits.items() if limit}
        # The pool in the settings. A command line may name another.
        pool = str(app.conf.worker_pool or "").partition(":")[0].rpartition(".")[2]
        self.pool = "thread" if pool == "threads" else pool

    def setting(self, name: str) -> Any:
        """Return the task's own value, or else its app's."""
        own = getattr(self.task, name, None)
        return getattr(self.app.conf, f"task_{name}") if own is None else own

    def visibility_timeout(self) -> float | None:
        """Return the seconds until the broker delivers an unacknowledged message again."""
        try:
            connection = self.app.connection_for_read()
        except Exception:
            # A URL that Celery can't read either.
            return None
        default = VISIBILITY_TIMEOUTS.get(str(connection.transport_cls or "").lower())
        given = (connection.transport_options or {}).get("visibility_timeout")
        return default if default is None or not given else float(given)


def _arguments(case: _Case) -> Iterator[Problem]:
    policy = case.policy
    if policy.max_hold is not None and policy.max_hold < case.ttl:
        yield Problem(
            "W035",
            f"max_hold of {policy.max_hold:g} s is shorter than the ttl of {case.ttl:g} s.",
            "Make the ttl the shorter one.",
        )
    if policy.on_conflict == "skip" and case.setting("ignore_result"):
        yield Problem(
            "I030",
            "only the result shows that a run was skipped, and results are ignored.",
            "Ignore this if no code needs it, keep the result, or connect lock_not_acquired.",
        )


def _redeliveries(case: _Case) -> Iterator[Problem]:
    policy, visible = case.policy, case.visibility_timeout()
    # A message that is acknowledged before it runs isn't delivered again.
    late = case.setting("acks_late")
    if visible is not None and late:
        runs = case.limits.get("time_limit") or case.limits.get("soft_time_limit")
        for what, length in (("time limit", runs), ("ttl", case.ttl)):
            if length is not None and length > visible:
                yield Problem(
                    "W030",
                    f"acks_late with a {what} of {length:g} s, and a broker that delivers again "
                    f"what isn't acknowledged within {visible:g} s.",
                    f"Set broker_transport_options['visibility_timeout'] to more than {length:g}, "
                    f"or shorten the {what}.",
                )
    if visible is not None and policy.on_conflict == "retry" and policy.max_conflict_retries:
        pause = policy.pause(policy.max_conflict_retries - 1)
        if pause > visible:
            yield Problem(
                "W031",
                f"pauses of up to {pause:g} s between conflicts, and a broker that delivers again "
                f"what isn't acknowledged within {visible:g} s, such as a message that waits.",
                "Lower retry_countdown, of which a pause is up to twelve times, or raise "
                "broker_transport_options['visibility_timeout'].",
            )
    # The app's setting may be meant for those of its tasks that acknowledge late.
    rejects = case.task.reject_on_worker_lost and not case.app.conf.task_reject_on_worker_lost
    if rejects and not late:
        yield Problem(
            "W036",
            "reject_on_worker_lost without acks_late has no effect: a killed run's work is lost.",
            "Give acks_late=True as well.",
        )
    if policy.redelivery == "run" and policy.on_conflict == "skip" and late:
        yield Problem(
            "W037",
            'redelivery="run" and on_conflict="skip" with acks_late: the message of a dead worker '
            "comes again while its lock still lasts, and is skipped and lost.",
            'Leave redelivery at "defer", or use on_conflict="retry".',
        )


def _times(case: _Case) -> Iterator[Problem]:
    alias, policy, ttl = case.alias, case.policy, case.ttl
    ignored = IGNORED_LIMITS.get(case.pool, ())
    for name in ignored:
        if name in case.limits and policy.max_hold is None:
            yield Problem(
                "W032",
                f"{name} of {case.limits[name]:g} s, which the pool {case.app.conf.worker_pool!r} "
                "ignores: a run that hangs keeps its lock.",
                "Give max_hold, after which the lock isn't renewed any more, or use another pool.",
            )
    has_timeout = "TIMEOUT" in conf.backend_class(alias.backend).option_names
    if has_timeout and ttl < REQUESTS * alias.timeout:
        yield Problem(
            "W033",
            f"ttl of {ttl:g} s, and a lock service that may take {alias.timeout:g} s to answer: "
            "after one renewal that hangs, there is no time for another.",
            f"Make the ttl at least {REQUESTS * alias.timeout:g} s, or lower "
            f"{alias.where('OPTIONS')}['TIMEOUT'].",
        )
    obeyed = [limit for name, limit in case.limits.items() if name not in ignored]
    waits = policy.patience(alias) if policy.on_conflict == "wait" else 0.0
    shown = "without a limit" if math.isinf(waits) else f"up to {waits:g} s"
    if waits and obeyed and waits >= min(obeyed):
        yield Problem(
            "W034",
            f"waits {shown} for its lock, and has a time limit of {min(obeyed):g} s: "
            "after a long wait, the body has no time left.",
            'Shorten blocking_timeout, or use on_conflict="retry", which keeps no worker busy.',
        )
    if math.isinf(waits) and not obeyed:
        yield Problem(
            "W040",
            "waits for its lock without a limit, and has no time limit: if the lock is never "
            "released, its worker does no other work.",
            'Give blocking_timeout= or a time limit, or use on_conflict="retry".',
        )


def _aborts(case: _Case) -> Iterator[Problem]:
    if case.policy.on_lost != "abort":
        return
    if case.pool == "gevent" or runtime.is_patched("_thread"):
        yield Problem(
            "W039",
            'on_lost="abort" can\'t interrupt a greenlet: under gevent it is the same as "raise".',
            'Use another pool, or on_lost="raise" with lease.check() in the body.',
        )
    number = conf.abort_signal()
    if (found := signal.getsignal(number)) not in (signal.SIG_DFL, interrupts.on_signal):
        yield Problem(
            "W038",
            f'on_lost="abort" interrupts a body by signal {int(number)}, which has the handler '
            f"{found!r} in this process.",
            "Set FENCEDLOCK_ABORT_SIGNAL to an unused signal.",
        )
