"""
Mutations of the package's source, each of which breaks one promise.

They are data for ``python -m tests.faults.mutants``, which shows that some test notices each.
"""

from . import celery, ledgers, redis, services, sessions, writes
from .mutation import Mutation

__all__ = ["MUTATIONS", "Mutation"]

MUTATIONS: tuple[Mutation, ...] = (
    *ledgers.MUTATIONS,
    *writes.MUTATIONS,
    *redis.MUTATIONS,
    *sessions.MUTATIONS,
    *services.MUTATIONS,
    *celery.MUTATIONS,
)
