"""Locks with fencing tokens for Django and Celery, enforced where Django writes."""

from .core.identity import Holder
from .exceptions import (
    AliasConflict,
    BackendUnavailable,
    FencedLockError,
    InsideTransaction,
    LeaseLost,
    LockNotAcquired,
    LockRequired,
    LockUpgrade,
    NotTheHolder,
    OutcomeUnknown,
    ReleaseBlocked,
    SettingsError,
    StaleFence,
    StaleObject,
    Unfenced,
    VersionConflict,
    WrongDatabase,
)
from .lease import Lease, current_lease
from .lock_sets import LeaseSet, current_leases, lock_all
from .locks import lock
from .ops.force_release import force_release

__version__ = "0.1.0"

__all__ = [
    "AliasConflict",
    "BackendUnavailable",
    "FencedLockError",
    "Holder",
    "InsideTransaction",
    "Lease",
    "LeaseLost",
    "LeaseSet",
    "LockNotAcquired",
    "LockRequired",
    "LockUpgrade",
    "NotTheHolder",
    "OutcomeUnknown",
    "ReleaseBlocked",
    "SettingsError",
    "StaleFence",
    "StaleObject",
    "Unfenced",
    "VersionConflict",
    "WrongDatabase",
    "current_lease",
    "current_leases",
    "force_release",
    "lock",
    "lock_all",
]
