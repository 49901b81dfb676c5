"""Locks with fencing tokens for Django and Celery, enforced where Django writes."""

from .exceptions import (
    FencedLockError,
    LeaseLost,
    LockNotAcquired,
    LockRequired,
    StaleFence,
    VersionConflict,
)
from .lease import Lease, current_lease
from .locks import lock
from .ops.force_release import force_release

__version__ = "0.1.0"

__all__ = [
    "FencedLockError",
    "Lease",
    "LeaseLost",
    "LockNotAcquired",
    "LockRequired",
    "StaleFence",
    "VersionConflict",
    "current_lease",
    "force_release",
    "lock",
]
