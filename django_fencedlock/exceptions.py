"""Every error that this package raises of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from .core.identity import Holder


class FencedLockError(Exception):
    """
    Base of all errors of django_fencedlock. Do not raise directly.

    None of them is a ``DatabaseError``: ``get_or_create()`` and many retry
    settings swallow those, and a retry under the same lease helps nobody.
    """

    #: What the error carries beside its message, in the order of its words.
    fields: tuple[str, ...] = ()

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        for field in self.fields:
            setattr(self, field, facts.pop(field, None))
        if facts:
            raise TypeError(f"{type(self).__name__} carries no {', '.join(sorted(facts))}.")

    def __reduce__(self) -> tuple[Any, ...]:
        # Celery moves errors between processes; BaseException's own way would
        # call the class with the message alone and drop the facts.
        facts = {field: getattr(self, field) for field in self.fields}
        return _rebuild, (type(self), str(self), facts)


def _rebuild(kind: type[FencedLockError], message: str, facts: dict[str, Any]) -> FencedLockError:
    return kind(message, **facts)


class LockNotAcquired(FencedLockError):
    """The lock is held by somebody else, and the time to wait for it is over."""

    fields = ("name", "alias", "holder")
    name: str
    alias: str
    holder: Holder | None


class AliasConflict(LockNotAcquired):
    """The name is live under another alias: two lock services on one name exclude nobody."""


class BackendUnavailable(FencedLockError):
    """The lock service could not be asked, or did not answer in time."""

    fields = ("name", "alias")
    name: str | None
    alias: str


class ReleaseBlocked(FencedLockError):
    """An open transaction keeps the fence of a lock from being lifted, so it isn't released."""

    fields = ("name", "alias", "holder", "blocker")
    name: str
    alias: str
    holder: Holder | None
    blocker: str | None


class InsideTransaction(FencedLockError):
    """The caller's own open transaction makes this grant useless or impossible."""

    fields = ("name", "alias")
    name: str
    alias: str


class LeaseLost(FencedLockError):
    """The lease was had, and is no longer."""

    fields = ("name", "owner", "token", "holder")
    name: str
    owner: str
    token: int | None
    holder: Holder | None


class LockRequired(FencedLockError):
    """A fenced write was tried with no lease of the row's lock name."""

    fields = ("name", "held")
    name: str
    held: tuple[str, ...]


class StaleFence(FencedLockError):
    """A newer grant of the lock's name exists; this holder's write is refused."""

    fields = ("name", "owner", "token", "holder")
    name: str
    owner: str
    token: int
    holder: Holder | None


class StaleObject(StaleFence):
    """
    The object is older than what was written into its row since.

    It was read before the lock was acquired, or without its fence: read it under the lock.
    """


class OutcomeUnknown(FencedLockError):
    """A COMMIT failed in a way that doesn't tell whether it took place."""

    fields = ("name", "owner", "token")
    name: str
    owner: str
    token: int


class WrongDatabase(FencedLockError):
    """A row, or a transaction, isn't in the database where the fences of its lock are."""

    fields = ("name", "database")
    name: str
    database: str


class VersionConflict(FencedLockError):
    """The row was changed since this object was loaded."""

    fields = ("model", "pk", "version")
    model: str
    pk: Any
    version: int


class NotTheHolder(FencedLockError, RuntimeError):
    """Other code tried to release a lease while its holder runs."""

    fields = ("name",)
    name: str


class Unfenced(FencedLockError):
    """A token was asked of a lock that was taken with ``fenced=False``."""

    fields = ("name",)
    name: str


class SettingsError(ImproperlyConfigured, FencedLockError):
    """``FENCEDLOCK`` says something that can't be followed."""
