"""
Mutations of the package's source, each of which breaks one promise.

They are data for ``python -m tests.faults.mutants``, which shows that some test notices each.
"""

from . import (
    asking,
    celery,
    comparing,
    forcing,
    keys,
    ledgers,
    naming,
    redis,
    rows,
    scripts,
    services,
    sessions,
    striking,
    telling,
    wire,
    writes,
)
from .mutation import Mutation

__all__ = ["GROUPS", "MUTATIONS", "Mutation"]

GROUPS: dict[str, tuple[Mutation, ...]] = {
    "Grants in the database": ledgers.MUTATIONS,
    "Comparisons in the SQL of the tables": comparing.MUTATIONS,
    "Fenced writes": (*writes.MUTATIONS, *rows.MUTATIONS),
    "Redis": (*redis.MUTATIONS, *scripts.MUTATIONS),
    "Session locks of PostgreSQL, and private connections": (
        *sessions.MUTATIONS,
        *keys.MUTATIONS,
    ),
    "Lock services, leases and renewals": services.MUTATIONS,
    "Tasks": celery.MUTATIONS,
    "Interrupted bodies, and messages that come again": striking.MUTATIONS,
    "Connections and the trigger": wire.MUTATIONS,
    "Forced release": forcing.MUTATIONS,
    "The admin and the command": asking.MUTATIONS,
    "History": telling.MUTATIONS,
    "Names, models, and what people are told": naming.MUTATIONS,
}

MUTATIONS = tuple(mutation for group in GROUPS.values() for mutation in group)
