"""Admin pages of locks, fences and history, and `FencedModelAdmin` for your own models."""

from .fenced import FencedModelAdmin
from .locks import FenceAdmin, HeldLockAdmin, LockEventAdmin

__all__ = ["FenceAdmin", "FencedModelAdmin", "HeldLockAdmin", "LockEventAdmin"]
