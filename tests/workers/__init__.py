"""
Real Celery workers for the tests, in processes of their own, gone when the tests are.

``Worker`` is one, ``Beat`` sends tasks to it, ``Broker`` is what lies between it and the test.
Bodies of tasks write down in the ``Journal`` when they begin and end, which survives their being
killed. ``tests.workers.tasks`` are the tasks, ``tests.workers.app`` is what Celery is started with.
"""

from .broker import Broker, FilesystemBroker, RabbitBroker, RedisBroker
from .journal import Journal, Span
from .worker import Beat, Worker

__all__ = [
    "Beat",
    "Broker",
    "FilesystemBroker",
    "Journal",
    "RabbitBroker",
    "RedisBroker",
    "Span",
    "Worker",
]
