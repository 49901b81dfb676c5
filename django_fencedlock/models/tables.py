"""The two tables: `Fence`, the newest grant of each name, and `HeldLock`, the registry."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import OuterRef, Subquery
from django.utils.translation import gettext_lazy as _

from ..names import MAX_LENGTH


class ExactCharField(models.CharField):  # type: ignore[type-arg]
    """
    A CharField whose values are equal only if every character is, on every database.

    MariaDB and MySQL would otherwise take ``A`` for ``a``, and ``a`` for ``a`` with a blank.
    """

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        parameters = super().db_parameters(connection)
        if connection.vendor == "mysql":
            mariadb = connection.mysql_is_mariadb  # type: ignore[attr-defined]
            parameters["collation"] = "utf8mb4_nopad_bin" if mariadb else "utf8mb4_0900_bin"
        return parameters


class Fence(models.Model):
    """
    The newest grant of a lock name. Written by grants alone, and never deleted.

    A fenced transaction locks this row, so nothing that beats or expires may ever be on it.
    """

    name = ExactCharField(_("lock name"), max_length=MAX_LENGTH, primary_key=True)
    token = models.BigIntegerField(_("token"), help_text=_("Only ever rises."))
    owner = models.CharField(_("owner"), max_length=32)

    class Meta:
        verbose_name = _("fence")
        verbose_name_plural = _("fences")

    def __str__(self) -> str:
        return f"{self.name} #{self.token}"


class HeldLockManager(models.Manager["HeldLock"]):
    """Adds ``token``: that of the fence, so long as this row's owner has the newest grant."""

    def get_queryset(self) -> models.QuerySet[HeldLock]:
        fence = Fence.objects.filter(name=OuterRef("name"), owner=OuterRef("owner"))
        return super().get_queryset().annotate(token=Subquery(fence.values("token")))


class HeldLock(models.Model):
    """
    The registry of held locks; for the database backend also the lease itself.

    A row may outlive its lock: a dead holder deletes nothing. Times are the server's.
    """

    name = ExactCharField(_("lock name"), max_length=MAX_LENGTH, primary_key=True)
    alias = models.CharField(_("alias"), max_length=100)
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
    acquired_at = models.DateTimeField(_("acquired"))
    renewed_at = models.DateTimeField(_("renewed"))
    # No index on a column that is renewed: it would cost Postgres its in-place updates.
    expires_at = models.DateTimeField(_("expires"))
    # Where a session lock lives: the server's process, its start, and the key.
    session_pid = models.BigIntegerField(null=True)
    session_started = models.DateTimeField(null=True)
    session_key = models.BigIntegerField(null=True)

    objects = HeldLockManager()

    class Meta:
        verbose_name = _("held lock")
        verbose_name_plural = _("held locks")

    def __str__(self) -> str:
        return str(self.name)
