"""Admin pages of locks, fences and events, `FencedModelAdmin` and `VersionedModelAdmin`."""

from .fenced import FencedModelAdmin, VersionedModelAdmin
from .locks import FenceAdmin, HeldLockAdmin, LockEventAdmin

__all__ = [
    "FenceAdmin",
    "FencedModelAdmin",
    "HeldLockAdmin",
    "LockEventAdmin",
    "VersionedModelAdmin",
]
