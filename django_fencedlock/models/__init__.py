"""The models: the two tables of the package, and what fences models of yours."""

from .fenced import FencedModel
from .fencing import Fencing
from .querysets import FencedManager, FencedQuerySet
from .tables import Fence, HeldLock
from .versioned import VersionedModel

__all__ = [
    "Fence",
    "FencedManager",
    "FencedModel",
    "FencedQuerySet",
    "Fencing",
    "HeldLock",
    "VersionedModel",
]
