"""
The tasks of the workers, plain and single.

``task("skip")`` is the one under ``@single_instance("{key}", on_conflict="skip")``, with its lock
on the alias ``default``; ``task("skip", "redis")`` has it on the alias ``redis``.
"""

import hashlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Task, _state, chain, current_app
from celery._state import connect_on_app_finalize
from celery.exceptions import Ignore, Reject

from django_fencedlock import current_lease, current_leases
from django_fencedlock.celery import single_instance
from tests.models import Invoice

from .app import MAIN
from .journal import Journal

#: The aliases in FENCEDLOCK of the workers: see tests/acceptance/conftest.py.
ALIASES = ["default", "rows", "sessions", "redis", "unfenced"]

_names: dict[tuple[str, str], str] = {}


class Mishap(Exception):
    """What a body raises that was told to."""


def task(kind: str, alias: str = "default") -> Any:
    return current_app.tasks[_names[kind, alias]]


def run(
    self: Any,
    key: str,
    value: Any = None,
    *,
    gate: bool = False,
    seconds: float = 0.0,
    grind: int = 0,
    outcome: str = "return",
    tidy: float = 0.0,
) -> Any:
    """
    Do as told, and write down when that begins and ends.

    Args:
        key: Which spans of the journal are this call's; names the lock.
        gate: Wait until the test opens the gate of the key.
        grind: Compute so many rounds in one call of C, in which no signal is seen.
        outcome: return, raise, retry, replace, chain, ignore or reject; "raise, return" has one per
            attempt. What replaces it, and the chain, are of the task "skip" under the same lock.
        tidy: Sleep for so long in a ``finally`` of the first attempt, under the lock.
    """
    journal = Journal()
    # Not the context's: a lease of another name is none of ours.
    lease = current_lease()
    attempts = outcome.split(", ")
    what = attempts[min(self.request.retries, len(attempts) - 1)]
    facts = {
        "task": self.name,
        "id": self.request.id,
        "value": value,
        "retries": self.request.retries,
        "redelivered": bool((self.request.delivery_info or {}).get("redelivered")),
        "token": lease.token if lease is not None and lease.fenced else None,
        "lock": lease.name if lease is not None else None,
    }
    with journal.body(key, **facts):
        if gate:
            journal.wait_at_gate(key)
        _sleep(seconds)
        if grind:
            hashlib.pbkdf2_hmac("sha256", b"", b"", grind)
        try:
            return _end(self, what, value)
        finally:
            _sleep(0 if self.request.retries else tidy)


def _sleep(seconds: float) -> None:
    """Sleep in steps: a signal that comes just as a sleep begins is seen only when that ends."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))


def _end(self: Any, outcome: str, value: Any) -> Any:
    if outcome == "return":
        return value
    if outcome == "raise":
        raise Mishap(value)
    if outcome == "retry":
        raise self.retry(countdown=0.1, max_retries=3)
    if outcome in ("replace", "chain"):
        key = self.request.args[0]
        step = task("skip").si(key, value)
        if outcome == "replace":
            return self.replace(step)
        return chain(step, task("plain").si(f"{key}-tail", value)).delay().id
    if outcome == "ignore":
        raise Ignore
    if outcome == "reject":
        raise Reject("told to", requeue=False)
    raise ValueError(outcome)


def _define(kind: str, alias: str = "default", **options: Any) -> Callable[[Any], Any]:
    def define(function: Any) -> Any:
        name = f"tests.{kind}" if alias == "default" else f"tests.{kind}.{alias}"
        _names[kind, alias] = name

        def add(app: Any) -> None:
            # Shared tasks would be those of every app of the tests' process.
            if app.main == MAIN:
                app._task_from_fun(function, name=name, bind=True, **options)

        connect_on_app_finalize(add)
        for app in _state._get_active_apps():
            if app.finalized:
                add(app)
        return function

    return define


def _policies(alias: str) -> None:
    fenced = alias != "unfenced"
    terms: dict[str, Any] = {"backend": "redis" if alias == "unfenced" else alias, "fenced": fenced}
    for policy in ("skip", "raise"):
        _define(policy, alias)(single_instance("{key}", on_conflict=policy, **terms)(run))
    wait = {"on_conflict": "wait", "blocking_timeout": 20}
    retry = {"on_conflict": "retry", "retry_countdown": 0.3}
    _define("wait", alias)(single_instance("{key}", **wait, **terms)(run))
    _define("retry", alias)(single_instance("{key}", **retry, **terms)(run))
    # The ttl is longer than a test: whoever gets the lock didn't wait for it to run out.
    late = {"acks_late": True, "reject_on_worker_lost": True}
    _define("late", alias, **late)(single_instance("{key}", **wait, **terms)(run))
    _define("late_skip", alias, **late)(single_instance("{key}", **terms)(run))
    if fenced:
        coalesce = partial(single_instance, "{key}", on_conflict="coalesce", **terms)
        _define("coalesce", alias)(coalesce()(run))
        _define("late_retry", alias, **late)(single_instance("{key}", **retry, **terms)(run))
        _define("late_coalesce", alias, **late)(coalesce(ttl=2)(run))


for _alias in ALIASES:
    _policies(_alias)

_define("plain")(run)
_define("plain_late", acks_late=True)(run)
_define("autoretry", autoretry_for=(Mishap,), max_retries=2, default_retry_delay=0.1)(
    single_instance("{key}", on_conflict="raise")(run)
)
_define("soft", soft_time_limit=1)(single_instance("{key}")(run))
_define("hard", time_limit=1)(single_instance("{key}")(run))
_define("short", acks_late=True)(single_instance("{key}", ttl=5)(run))
_define("any_delivery", acks_late=True)(single_instance("{key}", redelivery="run")(run))
_define("abort")(single_instance("{key}", ttl=1.5, on_lost="abort")(run))
_define("max_hold")(single_instance("{key}", ttl=3, max_hold=3, on_lost="abort")(run))
_define("skip", "down")(single_instance("{key}", backend="down")(run))


@_define("total")
@single_instance("{key}-total")
def total(self: Task, results: Any, key: str) -> Any:
    with Journal().body(f"{key}-total"):
        return results


def transfer(self: Task, key: str, source: int, target: int, amount: int) -> None:
    """Move an amount between two fenced rows, which are read first, under the locks of both."""
    leases = current_leases()
    assert leases is not None
    using = next(iter(leases.values())).database
    with Journal().body(key, amount=amount), leases.atomic():
        for pk, change in ((source, -amount), (target, amount)):
            row = Invoice.objects.using(using).get(pk=pk)
            _sleep(0.01)
            row.amount += change
            row.save()


_PAIR = ["tests.invoice:{source}", "tests.invoice:{target}"]
for _alias in ALIASES[:-1]:
    _define("transfer", _alias, acks_late=True, reject_on_worker_lost=True)(
        single_instance(_PAIR, backend=_alias, on_conflict="wait", blocking_timeout=60)(transfer)
    )
_define("transfer_retry", acks_late=True, reject_on_worker_lost=True)(
    single_instance(_PAIR, on_conflict="retry", retry_countdown=0.1)(transfer)
)


@_define("pay")
@single_instance(Invoice, pk="{invoice_id}")
def pay(self: Task, invoice_id: int, amount: int, gate: str = "") -> int:
    """Write a fenced row under the task's own lock; read it, and wait at a gate, before."""
    invoice = Invoice.objects.get(pk=invoice_id)
    invoice.amount += amount
    if gate:
        with Journal().body(gate):
            Journal().wait_at_gate(gate)
    invoice.save()
    lease = current_lease()
    assert lease is not None
    return lease.token
