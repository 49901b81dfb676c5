"""What is done to Celery's workers, and by them."""

import signal
from typing import Any

from .nemesis import Fault, Lab, kill, pause, watch

#: One of each kind; what is beneath has had its runs with other clients.
SITES = ("rows", "mariadb", "postgres", "redis")
TAKEN = {"injections": 2, "takeovers": 1}


def pause_worker(lab: Lab) -> None:
    lab.await_holder()
    lab.note("pause worker")
    with lab.crew.all_paused():
        lab.sleep(1.3, 2)
    lab.sleep(0.5, 1)


def kill_worker(lab: Lab) -> None:
    lab.await_holder()
    lab.note("kill worker")
    lab.crew.kill_all()
    lab.crew.fill()
    lab.sleep(1, 2)


def shut_down(lab: Lab) -> None:
    lab.await_holder()
    number = lab.random.choice([signal.SIGQUIT, signal.SIGTERM])
    lab.note(f"shut down by {number.name}")
    lab.crew.shut_down(number)
    lab.crew.fill()
    lab.sleep(1, 2)


def _often(seconds: float) -> dict[str, Any]:
    options = {"unacked_restore_interval": 1, "unacked_restore_throttle": 1}
    return {"broker_transport_options": {"visibility_timeout": seconds, **options}}


def _fault(name: str, injection: Any, needs: dict[str, int], **options: Any) -> Fault:
    celery = {"celery": {}, "task": {"acks_late": True}, "on_lost": "raise"}
    celery |= {key: options.pop(key) for key in tuple(options) if key in celery}
    return Fault(f"celery-{name}", injection, SITES, needs, celery=celery, **options)


LATE = {"acks_late": True, "reject_on_worker_lost": True}

CELERY_FAULTS = (
    _fault("pause", pause, TAKEN | {"refusals": 1}),
    _fault("abort", pause, TAKEN, on_lost="abort"),
    _fault("pause-worker", pause_worker, {"injections": 2}),
    _fault("kill", kill, TAKEN, task=LATE),
    _fault("kill-worker", kill_worker, TAKEN | {"redelivered": 1}, celery=_often(2)),
    _fault("shut-down", shut_down, {"injections": 2}),
    _fault("redelivery", watch, {"redelivered": 2}, celery=_often(1)),
    _fault("hard-limit", watch, TAKEN, task=LATE | {"time_limit": 2}, habits={"grind": 0.5}),
    _fault("retry", watch, {"redelivered": 2}, habits={"retry": 0.5}),
)
