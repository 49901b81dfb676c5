"""The models: the tables of the package, and what fences models of yours."""

from ..storage.tables import Fence, ForcedRelease, HeldLock, LockEvent, MessageRecord, PendingRun
from .fenced import FencedModel
from .fencing import Fencing
from .queryset import FencedManager, FencedQuerySet
from .versioned import VersionedModel

__all__ = [
    "Fence",
    "FencedManager",
    "FencedModel",
    "FencedQuerySet",
    "Fencing",
    "ForcedRelease",
    "HeldLock",
    "LockEvent",
    "MessageRecord",
    "PendingRun",
    "VersionedModel",
]
