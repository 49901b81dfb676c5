"""One fenced write: the lease that it goes under, and the condition that it is made on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from django.db import connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, F, Q, Value, When

from ..exceptions import StaleObject, WrongDatabase
from ..lease import Lease, held_names
from ..storage.fenced_atomic import grant_of, is_pinned
from ..storage.fences import Pin, WriteGrant, pin_sql
from .comparing import exactly, same_text
from .fencing import FencingOf
from .fields import REFUSED
from .refusals import Refusal


class Write(NamedTuple):
    """A write to the rows of one lock name."""

    fencing: FencingOf
    using: str
    #: What it goes under; None for a write without a lock that is allowed.
    grant: WriteGrant | None
    #: What tells these rows from others, as look-ups: mostly the columns of their lock's name.
    columns: Mapping[str, Any]
    doing: str = "Saving"
    #: For objects: the fences that their rows may have.
    fences: Q | None = None
    #: The write to the lock that the rows are given to, if that is another.
    moving_to: Write | None = None
    #: The name of the rows' lock.
    name: str | None = None

    @property
    def token(self) -> int:
        assert self.grant is not None
        return self.grant.token

    @property
    def is_pinned(self) -> bool:
        """Whether no newer grant can be recorded before the transaction ends."""
        grant = self.grant
        if grant is None or not self.fencing.spec.serialised:
            return False
        return is_pinned(connections[self.using], grant)

    def pin(self, connection: BaseDatabaseWrapper) -> WriteGrant | None:
        """The grant to be pinned in the statement itself; None if nothing is added by it."""
        grant = self.grant
        if grant is None or not self.fencing.spec.serialised or is_pinned(connection, grant):
            return None
        return grant

    def refusal(self, pk: Any = None) -> Refusal:
        assert self.grant is not None
        return Refusal(
            model=self.fencing.model,
            pk=pk,
            using=self.using,
            grant=self.grant,
            serialised=self.fencing.spec.serialised,
            doing=self.doing,
        )

    def own_columns(self) -> dict[str, Any]:
        """The columns of the fence's own table, but its primary key."""
        return {
            field.attname: self.columns[field.attname]
            for field in self.fencing.plan.guarding
            if field.attname in self.columns
        }


def write_for(
    fencing: FencingOf,
    name: str | None,
    columns: Mapping[str, Any],
    using: str,
    given: Lease | None,
    doing: str,
) -> Write:
    """
    Find the lease for the rows of lock `name`.

    Raises:
        LockRequired: There is none, and writes without a lock are rejected.
        WrongDatabase: The fences are in another database than the rows.
    """
    lease = fencing.lease_for(name, given, doing)
    if lease is not None and fencing.spec.serialised and lease.database != using:
        raise WrongDatabase(
            f"{doing} {fencing.model._meta.label}: its row is in database {using!r}, and the "
            f"fences of lock {name!r} are in {lease.database!r}. Name {using!r} as the "
            "FENCE_DATABASE of an alias and take the lock there, or give the model "
            "Fencing(mode='high_water'), which promises less.",
            name=name,
            database=using,
        )
    grant = None if lease is None else grant_of(lease)
    return Write(fencing, using, grant, columns, doing, name=name)


def write_for_new_row(
    fencing: FencingOf, name: str | None, using: str, given: Lease | None, doing: str
) -> Write:
    """
    Find the lease for a row that isn't there yet.

    One whose lock is named by its own primary key may always be added: nobody has its lock.
    """
    if fencing.is_of_own_pk and given is None and name not in held_names():
        return Write(fencing, using, None, {}, doing)
    return write_for(fencing, name, {}, using, given, doing)


def fences_of(write: Write, row: Any, loaded: Any) -> tuple[int, ...] | None:
    """
    Find the fences that an object's row may have for the object to be written.

    The fence that it was read with; and the lease's own token if it was read under this lease, so
    that nobody else can have written in between. None stands for any up to the token: an object
    that was never loaded overwrites what is there.

    Raises:
        StaleObject: It was loaded without its fence.
    """
    if row._state.adding:
        return None
    read_under = getattr(row._state, "fence_read_under", ())
    if read_under is None or not isinstance(loaded, int):
        raise write.refusal(row.pk).error(
            None,
            "its fence wasn't loaded with it, so its age can't be told; read the whole row under "
            "the lock",
            kind=StaleObject,
        )
    assert write.grant is not None
    # Not above the token: such a row is a newer holder's, or the fences were lost.
    accepted = {loaded} if loaded <= write.token else set()
    if write.grant.owner in read_under and row._state.db == write.using:
        accepted.add(write.token)
    return tuple(sorted(accepted)) or (REFUSED,)


def as_read(
    writes: Iterable[Write], objs: Iterable[Any], names: Iterable[str | None]
) -> list[Write]:
    """Writes of these objects, and of no other rows: made if the rows are as they were read."""
    by_name: dict[str | None, list[Any]] = {}
    for obj, name in zip(objs, names, strict=True):
        by_name.setdefault(name, []).append(obj)
    # Those without a name have a key alone, as Django makes them to set an order.
    nameless = by_name.get(None, [])
    found = []
    for write in writes:
        if write.grant is not None:
            own = [*by_name.get(write.name, ()), *nameless]
            keys = {str(obj.pk) for obj in own}
            for pk in write.columns.get("pk__in", ()):
                if str(pk) not in keys:
                    raise write.refusal(pk).moved(None)
            write = write._replace(fences=_fences_of_many(write, own))
        found.append(write)
    return found


def _fences_of_many(write: Write, rows: Iterable[Any]) -> Q:
    by_fences: dict[tuple[int, ...] | None, list[Any]] = {}
    for row in rows:
        by_fences.setdefault(fences_of(write, row, row.__dict__.get("fence")), []).append(row.pk)
    conditions: list[Any] = []
    for fences, pks in by_fences.items():
        condition = Q(fence__lte=write.token) if fences is None else Q(fence__in=fences)
        conditions.append(condition if len(by_fences) == 1 else condition & Q(pk__in=pks))
    return Q.create(conditions, connector=Q.OR)


def row_condition(
    write: Write, fences: Sequence[int] | None, connection: BaseDatabaseWrapper
) -> tuple[str, list[Any]]:
    """
    The condition of a single row's UPDATE or DELETE, given the fences that it may have.

    Made by hand: Django's way through Q and expressions costs more than the database's work.
    """
    quote = connection.ops.quote_name
    plan = write.fencing.plan
    table = quote(plan.table._meta.db_table)
    fence = f"{table}.{quote(plan.fence_column)}"
    given: list[Any] = [write.token] if fences is None else [*fences]
    if fences is None:
        parts = [f"{fence} <= %s"]
    elif len(given) == 1:
        parts = [f"{fence} = %s"]
    else:
        parts = [f"{fence} IN (%s, %s)"]
    for field in plan.guarding:
        # Somebody else may have given the row to another lock meanwhile.
        if field.attname in write.columns:
            column, value = f"{table}.{quote(str(field.column))}", "%s"
            if field.attname in plan.texts:
                column, value = exactly(connection, column), exactly(connection, value)
            parts.append(f"{column} = {value}")
            given.append(field.get_db_prep_value(write.columns[field.attname], connection))
    if (grant := write.pin(connection)) is not None:
        select, more = pin_sql(connection, grant)
        parts.append(f"({select})")
        given += more
    return " AND ".join(parts), given


def token_or_refused(writes: Iterable[Write]) -> Case:
    """
    What a statement over many rows sets the fence to.

    Every row that it may not write gets `REFUSED`, on which the statement fails as a whole.
    """
    return _by_rows(When(_condition(write), then=_new_fence(write)) for write in writes)


def fence_of_claimed(writes: Iterable[Write]) -> Case:
    """The fence that a row has after `token_or_refused` was written into it."""
    return _by_rows(When(_rows_of(write), then=_new_fence(write)) for write in writes)


def new_rows_fence(write: Write) -> Any:
    """What an INSERT sets the fence to."""
    if write.grant is None:
        return 0
    if (grant := write.pin(connections[write.using])) is None:
        return write.token
    return _by_rows([When(Pin(grant), then=Value(write.token))])


def _by_rows(branches: Iterable[When]) -> Case:
    return Case(*branches, default=Value(REFUSED), output_field=models.BigIntegerField())


def _rows_of(write: Write) -> Q:
    plan = write.fencing.plan
    plain = {key: value for key, value in write.columns.items() if key not in plan.texts}
    found = Q(**plain) if plain or not write.columns else Q()
    for field in plan.guarding:
        if field.attname in plan.texts and field.attname in write.columns:
            found &= same_text(field, write.columns[field.attname])
    return found if write.columns else Q(fence__gte=0)


def _condition(write: Write) -> Q:
    condition = _rows_of(write)
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


def gather(
    fencing: FencingOf,
    rows: Iterable[tuple[str | None, Mapping[str, Any]]],
    using: str,
    given: Lease | None,
    doing: str,
) -> list[Write]:
    """
    Find the leases for many rows, given as (name, look-ups).

    Raises:
        LockRequired: One of them isn't held, and writes without a lock are rejected.
    """
    return [write_for(fencing, name, columns, using, given, doing) for name, columns in rows]


def leases_of(writes: Sequence[Write]) -> list[Write]:
    """Those of the writes, and of the moves, that go under a lease."""
    targets = [write.moving_to for write in writes if write.moving_to is not None]
    return [write for write in (*writes, *targets) if write.grant is not None]
