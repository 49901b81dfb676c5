"""The tables: fences, held locks, forced releases and the history; and two for tasks."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, F, OuterRef, Subquery, Value, When
from django.utils.timezone import is_aware
from django.utils.translation import gettext_lazy as _

from ..backends.interface import SHARED
from ..conf import MAX_ALIAS
from ..core.names import MAX_LENGTH
from .dialect import as_time, new_id, utc_text

if not apps.is_installed("django_fencedlock"):
    raise ImproperlyConfigured(
        "django_fencedlock is not in INSTALLED_APPS. Add it, then run: manage.py migrate "
        "django_fencedlock"
    )


class ExactCharField(models.CharField):  # type: ignore[type-arg]
    """A CharField that compares every character, also on MariaDB and MySQL."""

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        found = super().db_type(connection)
        if found is None or connection.vendor != "postgresql":
            return found
        # The same type. Django gives an indexed "varchar" a second index for searches by prefix,
        # which would be written with each new name.
        return found.replace("varchar", "character varying", 1)

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        parameters = super().db_parameters(connection)
        if connection.vendor == "mysql":
            parameters["collation"] = exact_collation(connection)
        return parameters


class UTCDateTimeField(models.DateTimeField):  # type: ignore[type-arg]
    """A DateTimeField that stores and returns UTC, whatever ``USE_TZ`` and ``TIME_ZONE`` say."""

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.DateTimeField", args, kwargs

    def get_db_prep_value(
        self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False
    ) -> Any:
        value = value if prepared else self.get_prep_value(value)
        if connection.vendor != "postgresql" and isinstance(value, datetime) and is_aware(value):
            return utc_text(value)
        return super().get_db_prep_value(value, connection, prepared=True)

    def from_db_value(
        self, value: Any, expression: Any, connection: BaseDatabaseWrapper
    ) -> datetime | None:
        return None if value is None else as_time(value, connection)


def exact_collation(connection: BaseDatabaseWrapper) -> str:
    """Return the collation that compares every character, trailing blanks included."""
    mariadb = connection.mysql_is_mariadb  # type: ignore[attr-defined]
    return "utf8mb4_nopad_bin" if mariadb else "utf8mb4_0900_bin"


class _Named(models.Model):
    name: Any

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return str(self.name)


class Fence(models.Model):
    """The newest grant of a lock name. Fenced transactions lock the row: it has no heartbeat."""

    name = ExactCharField(_("lock name"), max_length=MAX_LENGTH, primary_key=True)
    token = models.BigIntegerField(_("token"), help_text=_("It only rises."))
    owner = models.CharField(_("owner"), max_length=32)

    class Meta:
        verbose_name = _("fence")
        verbose_name_plural = _("fences")

    def __str__(self) -> str:
        return f"{self.name} #{self.token}"


class HeldLockManager(models.Manager["HeldLock"]):
    """
    Leaves out the rows that readers lock, and adds ``token``.

    It is the fence's, if the owner of the row has the newest grant; all readers have one.
    """

    def get_queryset(self) -> models.QuerySet[HeldLock]:
        owner = Case(When(slot="", then=F("owner")), default=Value(SHARED))
        fence = Fence.objects.filter(name=OuterRef("name"), owner=OuterRef("fence_owner"))
        rows = super().get_queryset().exclude(owner=SHARED).alias(fence_owner=owner)
        return rows.annotate(token=Subquery(fence.values("token")))


class HeldLock(_Named):
    """The registry of held locks. With the database backend, a row is the lease itself."""

    id = models.BigIntegerField(primary_key=True, default=new_id)
    name = ExactCharField(_("lock name"), max_length=MAX_LENGTH)
    # Empty for an exclusive holder; the owner id for a reader.
    slot = ExactCharField(max_length=32)
    alias = models.CharField(_("alias"), max_length=MAX_ALIAS)
    backend = models.CharField(_("backend"), max_length=30)
    owner = models.CharField(_("owner"), max_length=32)
    fenced = models.BooleanField(_("fenced"))
    host = models.CharField(_("host"), max_length=100)
    boot_id = models.CharField(max_length=40)
    pid_namespace = models.CharField(max_length=40)
    pid = models.BigIntegerField(_("process"))
    pid_started = models.BigIntegerField()
    thread = models.CharField(_("thread"), max_length=100)
    task_name = models.CharField(_("task"), max_length=200)
    task_id = models.CharField(_("task id"), max_length=100)
    acquired_at = UTCDateTimeField(_("acquired"))
    renewed_at = UTCDateTimeField(_("renewed"))
    # An indexed column would prevent PostgreSQL's in-place updates (HOT) at each renewal.
    expires_at = UTCDateTimeField(_("expires"))
    # The session that holds the lock: the server's process, its start, and the lock's key.
    session_pid = models.BigIntegerField(null=True)
    session_started = UTCDateTimeField(null=True)
    session_key = models.BigIntegerField(null=True)
    # Of a permit: how many its name has. Null for any other lock.
    permits = models.IntegerField(_("permits"), null=True)
    # Of the row that readers lock: until when a waiting writer stops new ones.
    no_readers_until = UTCDateTimeField(null=True)

    objects = HeldLockManager()

    class Meta:
        verbose_name = _("held lock")
        verbose_name_plural = _("held locks")
        permissions = [("release_heldlock", "Can release held lock by force")]
        constraints = [
            models.UniqueConstraint(fields=["name", "slot"], name="fencedlock_heldlock_unique"),
        ]


class ForcedRelease(_Named):
    """A forced release. The former holder reads here who ordered it, and releases its session."""

    owner = ExactCharField(max_length=32, primary_key=True)
    name = ExactCharField(max_length=MAX_LENGTH)
    released_by = models.CharField(max_length=200)
    released_at = UTCDateTimeField(db_index=True)


class LockEvent(models.Model):
    """Something that happened to a lock, for people. No code relies on these rows."""

    class Kind(models.TextChoices):
        GRANTED = "granted", _("granted")
        LOST = "lost", _("lost")
        REJECTED = "rejected", _("write rejected")
        FORCED = "forced", _("released by force")

    happened_at = UTCDateTimeField(_("when"))
    name = ExactCharField(_("lock name"), max_length=MAX_LENGTH)
    kind = models.CharField(_("what"), max_length=10, choices=Kind)
    alias = models.CharField(_("alias"), max_length=MAX_ALIAS)
    token = models.BigIntegerField(_("token"), null=True)
    holder = models.CharField(_("holder"), max_length=400)
    note = models.CharField(_("note"), max_length=400)
    times = models.BigIntegerField(
        _("times"), help_text=_("Number of equal events within about a second.")
    )

    class Meta:
        verbose_name = _("lock event")
        verbose_name_plural = _("lock events")
        indexes = [
            models.Index(fields=["name", "kind", "id"], name="fencedlock_event_of_name"),
            models.Index(fields=["kind", "id"], name="fencedlock_event_of_kind"),
        ]

    def __str__(self) -> str:
        return f"{self.name}: {self.get_kind_display()}"


class PendingRun(_Named):
    """
    The run that the coalesced triggers of a task still need, under a lock name.

    It is pending while ``wanted > done``: a run that only started isn't done, as it may die.
    """

    name = ExactCharField(max_length=MAX_LENGTH)
    # Two tasks may share a lock; each has runs of its own.
    task_name = ExactCharField(max_length=MAX_LENGTH)
    alias = models.CharField(max_length=MAX_ALIAS)
    owner = models.CharField(max_length=32)
    # Numbers of triggers: of the newest one, and of those that a run has begun and ended for.
    wanted = models.BigIntegerField()
    started = models.BigIntegerField()
    done = models.BigIntegerField()
    # The newest trigger's arguments, and the options of its message, as JSON.
    body = models.TextField()
    options = models.TextField()
    # Empty if unknown. Only the workers of this queue check the row: the others can't run
    # the task, and may have another broker.
    queue = ExactCharField(max_length=MAX_LENGTH)
    # Runs that began and didn't end; messages that workers sent since.
    tries = models.IntegerField()
    rescues = models.IntegerField()
    # When workers next look at the row, to run the task or to delete the row. Null after they
    # stopped trying.
    due_at = UTCDateTimeField(null=True, db_index=True)
    updated_at = UTCDateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["name", "task_name"], name="fencedlock_pendingrun_unique"
            ),
        ]


class MessageRecord(_Named):
    """A message whose task was begun, and how the run ended. Brokers may deliver it again."""

    nonce = ExactCharField(max_length=36, primary_key=True)
    name = ExactCharField(max_length=MAX_LENGTH)
    owner = models.CharField(max_length=32)
    task_id = models.CharField(max_length=100)
    tries = models.IntegerField()
    began_at = UTCDateTimeField()
    finished_at = UTCDateTimeField(null=True)
    outcome = models.CharField(max_length=10)
    kept_until = UTCDateTimeField(db_index=True)
