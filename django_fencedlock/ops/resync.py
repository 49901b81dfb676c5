"""Lifts fences above the tokens of fenced models' rows, after a restore from an old backup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.apps import apps
from django.db import Error, IntegrityError, connections, router

from .. import conf
from ..models.fenced import FencedModel
from ..models.fencing import FencingOf
from ..storage.connections import ConnectionPool
from ..storage.fences import lift, too_low
from ..storage.vendors import ledger_for

#: Rows that are read at once, and fences that are lifted in one transaction.
BATCH = 500
#: Seconds within which a batch is lifted.
TIMEOUT = 60.0


@dataclass
class Resynced:
    """What became of the fences of one model's rows in one database."""

    model: str
    database: str
    fence_database: str
    #: Rows that were ever written under a lease.
    rows: int = 0
    #: Names whose fence was too low, with the highest token of a row.
    low: dict[str, int] = field(default_factory=dict)
    #: Those of them whose fence is as it was, since somebody has it locked.
    locked: list[str] = field(default_factory=list)
    #: Rows that no name can be made of.
    nameless: int = 0
    error: str = ""


def models(labels: Sequence[str] = ()) -> list[type[FencedModel]]:
    """The models whose rows' locks have names of their own; raises `LookupError`."""
    if labels:
        found: list[Any] = [apps.get_model(label) for label in labels]
        for model in found:
            if not issubclass(model, FencedModel):
                raise LookupError(
                    f"{model._meta.label} isn't a fenced model. Name models that inherit from "
                    "FencedModel, or none, for all of them."
                )
        return found
    return [
        model for model in apps.get_models() if issubclass(model, FencedModel) and _is_apart(model)
    ]


def _is_apart(model: type[FencedModel]) -> bool:
    """Whether its rows' names aren't made along with those of a parent."""
    table = model.fencing.table
    return model is table or model.fencing.spec is not table.fencing.spec


def databases_of(model: type[FencedModel]) -> list[str]:
    """Where rows of a model are whose fences could be too low."""
    fences = conf.config(model.fencing.spec.backend).fence_database
    if model.fencing.spec.serialised:
        return [fences]
    return [router.db_for_write(model)]


def resync(model: type[FencedModel], database: str, *, dry_run: bool) -> Resynced:
    """Lift the fences of one model's rows in one database."""
    fencing = model.fencing
    fences = conf.config(fencing.spec.backend).fence_database
    done = Resynced(model._meta.label, database, fences)
    if model._meta.db_table not in connections[database].introspection.table_names():
        done.error = (
            f"database {database!r} has no table {model._meta.db_table!r}; "
            f"run: manage.py migrate --database {database}"
        )
        return done
    sessions = ConnectionPool(fences, TIMEOUT)
    try:
        for highest in _highest(model, fencing, database, done):
            _resync(sessions, highest, done, dry_run)
    finally:
        sessions.close()
    return done


def _highest(
    model: type[FencedModel], fencing: FencingOf, database: str, done: Resynced
) -> Iterator[dict[str, int]]:
    """Batches of names with the highest token of the rows read."""
    for batch in _batches(model, fencing, database):
        highest: dict[str, int] = {}
        for name, token in batch:
            done.rows += 1
            if name is None:
                done.nameless += 1
            else:
                highest[name] = max(token, highest.get(name, 0))
        yield highest


def _batches(
    model: type[FencedModel], fencing: FencingOf, database: str
) -> Iterator[list[tuple[str | None, int]]]:
    # By the key, and not with one long query: that would need a transaction on some databases,
    # and on SQLite keep others from writing.
    rows: Any = model._base_manager.using(database).filter(fence__gt=0).order_by("pk")
    if fencing.columns is not None:
        rows = rows.only(*fencing.columns, "fence")
    last: Any = None
    while True:
        part = list((rows if last is None else rows.filter(pk__gt=last))[:BATCH])
        if not part:
            return
        last = part[-1].pk
        yield [(_name(row), row.fence) for row in part]


def _name(row: Any) -> str | None:
    try:
        name: str | None = row.fencing.name()
    except (TypeError, ValueError):
        return None
    return name


def _resync(
    sessions: ConnectionPool, highest: Mapping[str, int], done: Resynced, dry_run: bool
) -> None:
    found = sessions.run(lambda private: too_low(private, highest))
    low = {name: highest[name] for name in found}
    if not low:
        return
    locked = set() if dry_run else set(_lift(sessions, low))
    done.locked += sorted(locked - set(done.locked))
    for name, token in low.items():
        done.low[name] = max(token, done.low.get(name, 0))


def _lift(sessions: ConnectionPool, low: Mapping[str, int]) -> Iterator[str]:
    """Lift all that can be; the names whose fence somebody has locked."""
    try:
        sessions.run(lambda private: lift(private, low))
    except Error as exc:
        is_made = isinstance(exc, IntegrityError)
        if not is_made and not ledger_for(connections[sessions.using]).is_row_locked(exc):
            raise
        if len(low) > 1:
            # The others needn't suffer for one of them.
            for name, token in low.items():
                yield from _lift(sessions, {name: token})
        elif is_made:
            yield from _lift(sessions, low)
        else:
            yield from low
