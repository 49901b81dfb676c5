"""The errors of this package."""

from __future__ import annotations

from functools import partial
from inspect import get_annotations
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from .core.identity import Holder


class FencedLockError(Exception):
    """
    Base of all errors of django_fencedlock. Do not raise directly.

    None is a ``DatabaseError``: ``get_or_create()`` and many retry settings catch those, and a
    retry under the same lease fails again.
    """

    #: The names of the attributes that a subclass declares.
    fields: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        cls.fields = (*cls.fields, *get_annotations(cls))

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        for field in self.fields:
            setattr(self, field, facts.pop(field, None))
        if facts:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(facts))}.")

    def __reduce__(self) -> tuple[Any, ...]:
        # Celery pickles errors. BaseException would drop the fields.
        facts = {field: getattr(self, field) for field in self.fields}
        return partial(type(self), str(self), **facts), ()


class LockNotAcquired(FencedLockError):
    """Another holder has the lock, and the time to wait for it is over."""

    name: str
    alias: str
    holder: Holder | None
    #: Of a set of locks, or of the permits of one: the holder of each that was taken, by name; None
    #: if it is unknown.
    holders: dict[str, Holder | None] | None


class LockUpgrade(FencedLockError, RuntimeError):
    """A reader of a lock tried to acquire it exclusively, or its exclusive holder to share it."""

    name: str
    alias: str


class AliasConflict(LockNotAcquired):
    """The name is locked through another alias: two services can't exclude each other."""


class BackendUnavailable(FencedLockError):
    """The lock service could not be reached, or did not answer in time."""

    name: str | None
    alias: str


class ReleaseBlocked(FencedLockError):
    """An open transaction has the fence of a lock locked, so the lock isn't released."""

    name: str
    alias: str
    holder: Holder | None
    blocker: str | None


class InsideTransaction(FencedLockError):
    """The caller's own open transaction makes this grant useless or impossible."""

    name: str
    alias: str


class LeaseLost(FencedLockError):
    """The lease was held, and is lost."""

    name: str
    owner_id: str
    token: int | None
    holder: Holder | None


class LockRequired(FencedLockError):
    """A fenced write was tried without a lease of the row's lock name."""

    name: str
    held: tuple[str, ...]


class StaleFence(FencedLockError):
    """A newer grant of the lock name exists; the write was rejected."""

    #: Why, as signals and metrics name it.
    reason = "stale"
    name: str
    owner_id: str
    token: int
    holder: Holder | None


class StaleObject(StaleFence):
    """The object is older than its row: it was read before the lock was acquired."""

    reason = "read_before_lock"


class OutcomeUnknown(FencedLockError):
    """A COMMIT failed, and may or may not have taken effect."""

    name: str
    owner_id: str
    token: int


class WrongDatabase(FencedLockError):
    """A row or a transaction isn't in the database of its lock's fences."""

    name: str
    database: str


class VersionConflict(FencedLockError):
    """The row was changed since this object was loaded."""

    model: str
    pk: Any
    version: int


class NotTheHolder(FencedLockError, RuntimeError):
    """Other code tried to release a lease while its holder is running."""

    name: str


class Unfenced(FencedLockError):
    """A token was requested of a lock with ``fenced=False``."""

    name: str


class SettingsError(ImproperlyConfigured, FencedLockError):
    """A setting is invalid, or the tables of this package are missing."""
