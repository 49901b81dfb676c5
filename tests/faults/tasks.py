"""Clients that are Celery tasks: ``celery -A tests.faults.tasks worker``."""

import hashlib
import os
from pathlib import Path
from typing import Any

import django
from celery import Celery
from celery.signals import task_prerun, worker_ready

from django_fencedlock import current_lease
from django_fencedlock.celery import single_instance

from .history import now
from .settings import LAB

django.setup()

# It has tables, so Django has to be ready.
from .client import Client  # noqa: E402

app = Celery("tests.faults", set_as_current=True)
app.conf.update(LAB["celery"])

_clients: dict[int, Client] = {}
_asked: dict[str, int] = {}


def _client() -> Client:
    """Return this process's: a child after a fork has an account of its own."""
    pid = os.getpid()
    if pid not in _clients:
        _clients[pid] = Client(f"child-{pid}", LAB)
    return _clients[pid]


@worker_ready.connect
def _tell(**kwargs: Any) -> None:
    Path(LAB["ready"]).touch()


@task_prerun.connect
def _note(task_id: str, **kwargs: Any) -> None:
    _asked[task_id] = now()
    client = _client()
    client.notes.answer(client.notes.invoke("deliver", task_id), "ok")


LAB_TERMS = {"ttl": LAB["ttl"], "on_lost": LAB["on_lost"]}


@app.task(bind=True, name="faults.work", **LAB["task"])
@single_instance("row:{pk}", on_conflict="wait", blocking_timeout=4 * LAB["ttl"], **LAB_TERMS)
def work(self: Any, pk: int) -> None:
    lease = current_lease()
    assert lease is not None
    client = _client()
    notes, grant = client.notes, {"token": lease.token, "owner": lease.owner_id}
    asked = notes.invoke("acquire", lease.name, at=_asked.pop(self.request.id))
    notes.answer(asked, "ok", **grant)
    try:
        client.work_under(lease, pk)
        if client.random.random() < client.habits.get("grind", 0):
            # In one call of C, in which no signal is seen.
            hashlib.pbkdf2_hmac("sha256", b"", b"", 5_000_000)
        if client.random.random() < client.habits.get("retry", 0):
            raise self.retry(countdown=0.1, max_retries=3)
    finally:
        # It has no answer here: the caller releases it.
        notes.invoke("release", lease.name, **grant)
