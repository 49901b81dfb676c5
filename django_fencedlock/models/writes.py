"""A fenced write: the lease that it goes under, its condition, and the error of a rejection."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.db import connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, F, Q, Value, When

from .. import logs, signals
from ..core.identity import Holder, current_holder
from ..core.manager import services
from ..core.names import is_path, read_permit
from ..exceptions import LockRequired, StaleFence, StaleObject, VersionConflict, WrongDatabase
from ..lease import Lease, current_lease
from ..lease_context import held_names
from ..storage.fenced_atomic import grant_of, is_pinned
from ..storage.fences import Pin, WriteGrant, overtaken, pin_sql
from .base import ADDING, DELETING, SAVING, Guard, SaveHooks
from .fencing import FencingOf
from .fields import REJECTED, exactly, same_text

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Write:
    """A write to the rows of one lock name."""

    fencing: FencingOf
    using: str
    doing: str
    #: The name of the rows' lock.
    name: str | None = None
    #: Look-ups that find these rows among others: mostly the columns of their lock's name.
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: What it goes under; None for a write without a lock that is allowed.
    grant: WriteGrant | None = None
    #: For objects: their primary keys, and the fences that their rows may have.
    keys: Sequence[Any] = ()
    fences: Q | None = None
    #: The write to the lock that the rows are moved to, if that is another lock.
    moving_to: Write | None = None
    #: The object that is written, if it is one.
    row: Any = None
    #: The number of locks that the statement needs; 0 if it isn't known.
    locks: int = 1

    def under(self, given: Lease | None) -> Write:
        """Find the lease that the write goes under."""
        lease = self._find(given)
        if lease is not None and self.fencing.spec.serialised and lease.database != self.using:
            raise WrongDatabase(
                f"{self.doing} {self.fencing.model._meta.label}: its row is in database "
                f"{self.using!r}, and the fences of lock {self.name!r} are in {lease.database!r}. "
                f"Give Fencing(backend=...) an alias with {self.using!r} as FENCE_DATABASE, or use "
                "Fencing(mode='high_water'), which promises less.",
                name=self.name,
                database=self.using,
            )
        self.grant = None if lease is None else grant_of(lease)
        return self

    def adding(self, given: Lease | None) -> Write:
        """Find the lease for rows that aren't there yet."""
        is_free = self.fencing.is_of_own_pk and given is None and self.name not in held_names()
        # No holder has the lock of a row that names it by a primary key of its own.
        return self if is_free else self.under(given)

    def _find(self, given: Lease | None) -> Lease | None:
        if given is not None:
            if given.name != self.name:
                raise self.lock_required(
                    f"the given lease is of lock {given.name!r}{_about_kinds([given.name])}"
                )
            if given.released or not given.is_of_this_process():
                raise self.lock_required("the given lease was released")
        lease = given or (current_lease(self.name) if self.name is not None else None)
        if lease is not None and lease.fenced and not lease.shared:
            return lease
        policy, label = self.fencing.spec.without_lock, self.fencing.model._meta.label
        if policy == "reject":
            raise self.lock_required(_why_not_covered(lease) if lease is not None else "")
        if policy == "warn":
            facts = logs.facts(name=self.name, model=label)
            logger.warning("%s %s without lock %r", self.doing, label, self.name, extra=facts)
        return None

    def lock_required(self, why: str) -> LockRequired:
        """Return the error for a write that no lease covers."""
        fencing, name, held = self.fencing, self.name, held_names()
        model, values = fencing.model, self.columns
        if self.row is not None:
            columns = fencing.columns or ()
            values = {column: fencing.value_of(self.row, column) for column in columns}
        wanted, remedy = f"lock {name!r}", f"Acquire it: with {fencing.usage(values)}:"
        if fencing.spec.path:
            remedy = f"Write inside: with {fencing.usage(values)} as lease, lease.atomic():"
        if self.locks != 1 and not fencing.spec.path:
            wanted = f"{self.locks} locks" if self.locks else "the locks of its rows"
            wanted += "" if name is None else f", such as {name!r}"
            remedy = f"Acquire them: with {model.__name__}.fencing.lock_all(queryset):"
        elif name is None:
            empty = ", ".join(fencing.columns or ()) or "what its callable returned"
            wanted, why = "a lock", f"it has no name, as {empty} is empty or an expression"
            remedy = "Set that to a value first."
        if not why and held:
            why = f"held here: {', '.join(map(repr, held[:3]))}{', ...' * (len(held) > 3)}"
            why += _about_kinds(held)
        elif not why:
            why, leases = "none is held here", self._leases()
            if any(lease.put_off and lease.who is current_holder() for lease in leases):
                why, remedy = "it was released before this", "Write inside its `with` block."
            elif leases:
                call = "delete" if self.doing == DELETING else "save"
                give = "using_lease(lease)" if self.row is None else f"{call}(lease=lease)"
                why = "another thread or task of this process holds it"
                remedy = f"{remedy[:-1]}, or pass its lease: {give}."
        return LockRequired(
            f"{self.doing} {model._meta.label} needs {wanted}; {why}. {remedy}",
            name=name,
            held=held,
        )

    def _leases(self) -> list[Lease]:
        """Return the leases of the lock in this process, under any alias."""
        leases = (lease for each in [*services.values()] for lease in each.keeper.leases())
        return [
            lease
            for lease in leases
            if lease.name == self.name and lease.fenced and not lease.shared
        ]

    @property
    def token(self) -> int:
        assert self.grant is not None
        return self.grant.token

    def pin(self, connection: BaseDatabaseWrapper) -> WriteGrant | None:
        """Return the grant that the statement has to lock; None if it is locked, or needn't be."""
        grant = self.grant
        if grant is None or not self.fencing.spec.serialised or is_pinned(connection, grant):
            return None
        if is_path(grant.name):
            # The statement would lock one fence alone. Whatever is allowed without a lock: a holder
            # relies on the check.
            raise self.lock_required(
                "this is outside of lease.atomic(), which checks the locks above it as well"
            )
        return grant

    def error(
        self,
        why: str,
        *,
        pk: Any = None,
        row_fence: int | None = None,
        holder: Holder | None = None,
        kind: type[StaleFence] = StaleFence,
    ) -> StaleFence:
        """Return the error of a rejection; it is logged, and its signal sent, here and once."""
        grant, model, label = self.grant, self.fencing.model, self.fencing.model._meta.label
        assert grant is not None
        facts = {"name": grant.name, "alias": grant.alias, "token": grant.token}
        who = logs.facts(owner=grant.owner, holder=holder and str(holder))
        known: dict[str, Any] = {
            "model": label,
            "pk": None if pk is None else repr(pk),
            "lock": repr(grant.name),
        }
        known |= {"row_token": row_fence, "writer_token": grant.token, "holder": holder}
        # An object that was read before the lock is a bug of the code, and no incident.
        logger.log(
            logging.WARNING if kind is StaleObject else logging.ERROR,
            "Rejected a stale %s: %s",
            "object" if kind is StaleObject else "write",
            " ".join(f"{key}={value}" for key, value in known.items() if value is not None),
            extra=who
            | logs.facts(model=label, pk=pk, row_token=row_fence, reason=kind.reason, **facts),
        )
        facts |= {"pk": pk, "row_token": row_fence, "reason": kind.reason}
        signals.send(signals.stale_write_rejected, model, holder=holder, **facts)
        row = label if pk is None else f"{label} pk={pk!r}"
        return kind(
            f"{self.doing} {row} under token {grant.token} of lock {grant.name!r} was rejected: "
            f"{why}.",
            name=grant.name,
            owner_id=grant.owner,
            token=grant.token,
            holder=holder,
        )

    def moved(self, pk: Any, row_fence: int | None = None) -> StaleFence:
        """Return the error for an object whose lock is another one than its row's."""
        why = "the row belongs to another lock than the one that its name gives now; to move it, "
        return self.error(f"{why}update() it under the leases of both", pk=pk, row_fence=row_fence)

    def superseded(self, pk: Any = None) -> StaleFence | None:
        """Return the error if a newer grant exists; None if this is still the newest."""
        if not self.fencing.spec.serialised:
            return None
        assert self.grant is not None
        found = overtaken(connections[self.using], self.grant)
        return None if found is None else self.error(found[0], pk=pk, holder=found[1])

    def outdated(self) -> StaleFence | None:
        """Return the error if one of the objects was read before the lock, and written since."""
        if self.fences is None:
            return None
        rows: models.QuerySet[Any] = models.QuerySet(self.fencing.model, using=self.using)
        rows = rows.filter(is_of(self), ~self.fences, pk__in=self.keys, fence__lte=self.token)
        why = "it was read before the lock was acquired, and written since; read it again under the"
        found = [*rows.values_list("pk", flat=True)[:1]]
        return self.error(f"{why} lock", pk=found[0], kind=StaleObject) if found else None


def _why_not_covered(lease: Lease) -> str:
    if lease.shared:
        return "the lock is held shared here, and others may read the row meanwhile"
    return "the lease held here was acquired with fenced=False"


WRITTEN_SINCE = (
    "a row was written since it was read or under a newer token, or belongs to another lock"
)


def rejected(writes: Sequence[Write], pk: Any = None, missed: str = "") -> StaleFence:
    """Return the error for a statement that the constraint failed, or that `missed` a row."""
    why = missed or WRITTEN_SINCE
    if len(writes) > 1:
        some = [repr(write.name) for write in writes[:3]] + ["..."] * (len(writes) > 3)
        why += f" (of the locks {', '.join(some)})"
    connection = connections[writes[0].using]
    # A statement that failed leaves the transaction unusable.
    is_broken = connection.needs_rollback or (not missed and connection.vendor == "postgresql")
    if connection.in_atomic_block and is_broken:
        return writes[0].error(f"a newer grant exists, or {why}", pk=pk)
    found = (superseded for write in writes if (superseded := write.superseded(pk)))
    # Not after a statement that wrote the others: their rows have its own token.
    old = (outdated for write in writes if not missed and (outdated := write.outdated()))
    return next(found, None) or next(old, None) or writes[0].error(why, pk=pk)


def version_conflict(
    model: type[models.Model], doing: str, why: str, *, pk: Any = None, version: int | None = None
) -> VersionConflict:
    """Return the error for an object whose row was written since it was loaded."""
    label = model._meta.label
    row = label if pk is None else f"{label} pk={pk!r}"
    text = f"{doing} {row} was rejected: {why}. Load it again, and repeat the change."
    return VersionConflict(text, model=label, pk=pk, version=version)


def leases_of(writes: Sequence[Write]) -> list[Write]:
    """Return those of the writes, and of the moves, that go under a lease."""
    targets = [write.moving_to for write in writes if write.moving_to is not None]
    return [write for write in (*writes, *targets) if write.grant is not None]


def accepted_fences(write: Write, row: Any) -> tuple[int, ...] | None:
    """
    Find the fences that an object's row may have for the object to be written.

    The fence that it was read with, and the lease's own token if it was read under this lease: then
    no other holder can have written in between. None stands for any up to the token.
    """
    if row._state.adding:
        return None  # An object that was never loaded overwrites what is there.
    loaded = row.__dict__.get("fence")
    read_under = getattr(row._state, "fence_read_under", ())
    if read_under is None or not isinstance(loaded, int):
        why = "its fence wasn't loaded with it, so its age is unknown; "
        raise write.error(f"{why}read the whole row under the lock", pk=row.pk, kind=StaleObject)
    assert write.grant is not None
    # Not above the token: such a row is a newer holder's, or the fences were lost.
    token = write.grant.token
    accepted: tuple[int, ...] = (loaded,) if loaded <= token else ()
    if loaded != token and write.grant.owner in read_under and row._state.db == write.using:
        accepted += (token,)
    return accepted or (REJECTED,)


class FenceGuard(Guard):
    """Raises the fence to the lease's token, on the condition that this is the newest."""

    column = "fence"

    def __init__(self, instance: SaveHooks, write: Write) -> None:
        self.write = write
        self.keeps = write.grant is None
        #: The fences that the row may have; None for any up to the token.
        self.fences: tuple[int, ...] | None = None
        if write.grant is not None:
            self.updated = self.after_insert = write.grant.token
            if write.doing != ADDING:
                self.fences = accepted_fences(write, instance)
        elif write.doing == ADDING:
            # A row without a lock may be added, but never overwrite another row of its key.
            self.insert_only = write.fencing.spec.without_lock == "reject"
        super().__init__(instance)

    @property
    def inserted(self) -> Any:
        return inserted_fence(self.write)

    def condition(self, table: str, connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
        write, fencing, quote = self.write, self.write.fencing, connection.ops.quote_name
        fence = f"{table}.{quote(fencing.fence_column)}"
        given: list[Any] = [write.token] if self.fences is None else [*self.fences]
        places = ", ".join(["%s"] * len(given))
        parts = [f"{fence} <= %s" if self.fences is None else f"{fence} IN ({places})"]
        for field in fencing.compared:
            if field.attname not in write.columns:
                continue  # A new row, which may replace an old one of its key.
            # Another holder may have moved the row to another lock meanwhile.
            column, value = f"{table}.{quote(str(field.column))}", "%s"
            if field.attname in fencing.texts:
                column, value = exactly(connection, column), exactly(connection, value)
            parts.append(f"{column} = {value}")
            given.append(field.get_db_prep_value(write.columns[field.attname], connection))
        if (grant := write.pin(connection)) is not None:
            select, more = pin_sql(connection, grant)
            parts.append(f"({select})")
            given += more
        return " AND ".join(parts), given

    def overwrote(self) -> None:
        if self.keeps and self.write.doing == ADDING:
            dataclasses.replace(self.write, doing=SAVING).under(None)

    def failed(self) -> Exception:
        return rejected([self.write], self.instance.pk)

    def explain(self, row: Any) -> None:
        write, pk, columns = self.write, self.instance.pk, self.write.columns
        if superseded := write.superseded(pk):
            raise superseded
        found = row.values_list("fence", *columns).first()
        if found is None:
            if self.instance._state.adding:
                return
            raise write.error("its row was deleted, and isn't inserted again", pk=pk)
        fence, *values = found
        if values != [*columns.values()]:
            raise write.moved(pk, fence)
        if fence > write.token:
            why = f"the row was written under token {fence} already"
            raise write.error(why, pk=pk, row_fence=fence)
        if self.fences is not None and fence not in self.fences:
            lease = "this lease" if fence == write.token else f"token {fence}"
            why = (
                f"it was read before the lock was acquired, and written under {lease} since; read "
                "it again under the lock"
            )
            raise write.error(why, pk=pk, row_fence=fence, kind=StaleObject)


def limit_to(writes: Iterable[Write], objs: Sequence[Any], names: Sequence[str | None]) -> None:
    """Limit writes to these objects, and to rows that are as they were read."""
    by_name: dict[str | None, list[Any]] = {None: []}
    for obj, name in zip(objs, names, strict=True):
        by_name.setdefault(name, []).append(obj)
    for write in writes:
        if write.grant is None:
            continue
        # Django makes objects without a name, of a key alone, to set an order.
        own = [*by_name.get(write.name, ()), *by_name[None]]
        keys = {str(obj.pk) for obj in own}
        for pk in write.columns.get("pk__in", ()):
            if str(pk) not in keys:
                raise write.moved(pk)
        write.keys, write.fences = [obj.pk for obj in own], _fences_of_many(write, own)


def _fences_of_many(write: Write, rows: Iterable[Any]) -> Q:
    by_fences: dict[tuple[int, ...] | None, list[Any]] = {}
    for row in rows:
        by_fences.setdefault(accepted_fences(write, row), []).append(row.pk)
    conditions: list[Any] = []
    for fences, pks in by_fences.items():
        condition = Q(fence__lte=write.token) if fences is None else Q(fence__in=fences)
        conditions.append(condition if len(by_fences) == 1 else condition & Q(pk__in=pks))
    return Q.create(conditions, connector=Q.OR)


def token_or_rejected(writes: Iterable[Write]) -> Case:
    """Return what an UPDATE sets the fence to: REJECTED in every row that it may not write."""
    return by_rows(When(may_write(write), then=_new_fence(write)) for write in writes)


def inserted_fence(write: Write) -> Any:
    if write.grant is None:
        return 0
    if (grant := write.pin(connections[write.using])) is None:
        return write.token
    return by_rows([When(Pin(grant), then=Value(write.token))])


def by_rows(branches: Iterable[When]) -> Case:
    """Return a number by row; REJECTED for those that no branch is of."""
    return Case(*branches, default=Value(REJECTED), output_field=models.BigIntegerField())


def is_of(write: Write) -> Q:
    """Return the condition that a row is one of the write's."""
    texts = write.fencing.texts
    # A CASE takes no empty condition, and all fences are as high.
    found = Q(fence__gte=0, **{k: value for k, value in write.columns.items() if k not in texts})
    for field in write.fencing.compared:
        if field.attname in texts and field.attname in write.columns:
            found &= same_text(field, write.columns[field.attname])
    return found


def may_write(write: Write) -> Q:
    """Return the condition that a row is one of the write's, and may be written."""
    condition = is_of(write)
    if write.grant is not None:
        condition &= Q(fence__lte=write.token) if write.fences is None else write.fences
    for each in (write, write.moving_to):
        if each is not None and (grant := each.pin(connections[each.using])) is not None:
            condition &= Q(Pin(grant))
    return condition


def _new_fence(write: Write) -> Any:
    target = write.moving_to
    if target is not None:
        # Tokens of different names can't be compared: 0 if it was never written under this one.
        return Value(0 if target.grant is None else target.token)
    return F("fence") if write.grant is None else Value(write.token)


def _about_kinds(held: Sequence[str]) -> str:
    """Return what a message says of held locks that cover no row, or one row alone."""
    if any(map(is_path, held)):
        return " (a path covers no row beneath it)"
    # The holder of another one may write the row.
    return " (a permit covers no row)" if any(map(read_permit, held)) else ""
