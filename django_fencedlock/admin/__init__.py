"""Admin pages of locks, fences and events, and `FencedModelAdmin`."""

from .fenced import FencedModelAdmin
from .locks import FenceAdmin, HeldLockAdmin, LockEventAdmin

__all__ = ["FenceAdmin", "FencedModelAdmin", "HeldLockAdmin", "LockEventAdmin"]
