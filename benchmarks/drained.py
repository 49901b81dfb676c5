"""The Celery app and the tasks of ``benchmarks.tasks``, for its worker and for itself."""

from __future__ import annotations

import json
import os
import time
from importlib.util import find_spec

import django
from celery import Celery
from django.conf import settings

GIVEN = json.loads(os.environ["FENCEDLOCK_BENCHMARK"])
#: Where the marks of a round keep when it began and ended.
BEGUN, ENDED = "benchmark:begun", "benchmark:ended"

settings.configure(
    INSTALLED_APPS=["django_fencedlock"],
    DATABASES={"default": GIVEN["database"]},
    FENCEDLOCK={
        "default": {},
        "redis": {
            "BACKEND": "django_fencedlock.backends.redis.RedisBackend",
            "LOCATION": GIVEN["locks"],
        },
    },
    USE_TZ=True,
)
django.setup()

from django_fencedlock.celery import single_instance  # noqa: E402

app = Celery("drained", broker=GIVEN["broker"], backend=GIVEN["results"])
app.conf.update(
    task_default_queue="control",
    task_ignore_result=not GIVEN["results"],
    worker_prefetch_multiplier=4,
    broker_transport_options={"polling_interval": 0.01},
)


def body(number: int) -> None:
    """
    Do nothing.
    """


bare = app.task(body, name="bare")
unfenced = app.task(
    single_instance("bench:{number}", backend="redis", fenced=False)(body), name="unfenced"
)
fenced = app.task(single_instance("bench:{number}", backend="redis")(body), name="fenced")
once = app.task(
    single_instance("bench:{number}", backend="redis", fenced=False, redelivery="run")(body),
    name="once",
)
fenced_once = app.task(
    single_instance("bench:{number}", backend="redis", redelivery="run")(body), name="fenced_once"
)

# Peers that are installed; they take their locks when a message is published.
app.conf.ONCE = {
    "backend": "celery_once.backends.Redis",
    "settings": {"url": GIVEN["locks"], "default_timeout": 600},
}
app.conf.singleton_backend_url = GIVEN["locks"]
if find_spec("celery_once"):
    from celery_once import QueueOnce

    app.task(body, name="celery-once", base=QueueOnce)
if find_spec("celery_singleton"):
    from celery_singleton import Singleton

    app.task(body, name="celery-singleton", base=Singleton)


@app.task(name="mark", ignore_result=True)
def mark(key: str) -> None:
    """
    Note when this message's turn came.
    """
    import redis

    redis.Redis.from_url(GIVEN["locks"]).set(key, time.perf_counter())
