"""Finds out why a write was refused, and says so: error, log line and signal."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db import Error, connections, models

from .. import logs, signals
from ..core.identity import Holder
from ..exceptions import StaleFence, VersionConflict
from ..storage.fences import WriteGrant, overtaken

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is known of a write that was refused."""

    model: type[models.Model]
    #: The primary key, or None for a statement over many rows.
    pk: Any
    using: str
    grant: WriteGrant
    #: Whether the fences are in the row's own database.
    serialised: bool
    doing: str

    def error(
        self,
        row_fence: int | None,
        why: str,
        holder: Holder | None = None,
        kind: type[StaleFence] = StaleFence,
    ) -> StaleFence:
        """The error to raise; it is logged, and the signal sent, here and once."""
        self._log(row_fence, holder)
        signals.send(
            signals.stale_write_rejected,
            self.model,
            pk=self.pk,
            name=self.grant.name,
            alias=self.grant.alias,
            token=self.grant.token,
            row_token=row_fence,
            holder=holder,
        )
        label = self.model._meta.label
        row = label if self.pk is None else f"{label} pk={self.pk!r}"
        return kind(
            f"{self.doing} {row} under token {self.grant.token} of lock {self.grant.name!r} was "
            f"refused: {why}.",
            name=self.grant.name,
            owner=self.grant.owner,
            token=self.grant.token,
            holder=holder,
        )

    def moved(self, row_fence: int | None) -> StaleFence:
        """The error for an object whose name is that of another lock than its row's."""
        return self.error(
            row_fence,
            "the row belongs to another lock than the one that its name gives now; to move it, "
            "update() it under the leases of both",
        )

    def _log(self, row_fence: int | None, holder: Holder | None) -> None:
        label = self.model._meta.label
        logger.error(
            "Refused a stale write: model=%s pk=%r lock=%r row_token=%s writer_token=%s holder=%s",
            label,
            self.pk,
            self.grant.name,
            row_fence,
            self.grant.token,
            holder or "unknown",
            extra=logs.facts(
                name=self.grant.name,
                alias=self.grant.alias,
                token=self.grant.token,
                owner=self.grant.owner,
                holder=holder and str(holder),
                model=label,
                pk=self.pk,
                row_token=row_fence,
            ),
        )

    def superseded(self) -> StaleFence | None:
        """The error if a newer grant exists; None if this is still the newest."""
        if not self.serialised:
            return None
        found = overtaken(connections[self.using], self.grant)
        return None if found is None else self.error(None, found.why, found.holder)

    def of_statement(self) -> StaleFence:
        """The error for a statement that the constraint stopped."""
        if not _answers(self.using):
            return self.error(
                None,
                "a newer grant exists, or a row was written since it was read or under a newer "
                "token, or belongs to another lock",
            )
        return self.superseded() or self.error(
            None,
            "a row was written since it was read or under a newer token, or belongs to another "
            "lock",
        )


def of_many(refusals: Sequence[Refusal]) -> StaleFence:
    """The error for a statement over rows of several locks: that of the one that was overtaken."""
    first, *others = refusals
    if not others:
        return first.of_statement()
    if _answers(first.using):
        for refusal in refusals:
            if superseded := refusal.superseded():
                return superseded
    names = ", ".join(repr(refusal.grant.name) for refusal in refusals[:3])
    more = f" and {len(refusals) - 3} more" if len(refusals) > 3 else ""
    return first.error(
        None,
        f"a newer grant of one of the locks {names}{more} exists, or one of their rows was written "
        "since it was read or under a newer token, or belongs to another lock",
    )


def version_conflict(
    model: type[models.Model], pk: Any, version: int | None, why: str
) -> VersionConflict:
    """The error for an object that somebody else has written meanwhile."""
    row = model._meta.label if pk is None else f"{model._meta.label} pk={pk!r}"
    return VersionConflict(
        f"{row} was written by somebody else: {why}. Load it again.",
        model=model._meta.label,
        pk=pk,
        version=version,
    )


def _answers(using: str) -> bool:
    """Whether a question can be asked after a statement failed: not within its transaction."""
    connection = connections[using]
    broken = connection.vendor == "postgresql" or connection.needs_rollback
    return not (connection.in_atomic_block and broken)


def names_constraint(error: Error, constraint: str) -> bool:
    """Whether `error` says that `constraint` failed, and nothing else."""
    diag = getattr(error.__cause__, "diag", None)
    if diag is not None and getattr(diag, "constraint_name", None):
        return bool(diag.constraint_name == constraint)
    # SQLite: "CHECK constraint failed: name"; MariaDB (an OperationalError, 4025): "CONSTRAINT
    # `name` failed for ..."; MySQL: "Check constraint 'name' is violated."
    return constraint in str(error) and "constraint" in str(error).lower()
