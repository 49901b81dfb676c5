"""The models: the two tables of the package."""

from .tables import Fence, HeldLock

__all__ = ["Fence", "HeldLock"]
