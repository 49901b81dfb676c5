"""The admin: pages of locks, fences and history, and `FencedModelAdmin` for models of yours."""

from .fenced import FencedModelAdmin
from .held_locks import FenceAdmin, HeldLockAdmin, LockEventAdmin

__all__ = ["FenceAdmin", "FencedModelAdmin", "HeldLockAdmin", "LockEventAdmin"]
