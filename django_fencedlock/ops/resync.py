"""Raise fences above the tokens of fenced rows, after a restore from an old backup."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from django.apps import apps
from django.db import Error, connections, router

from .. import conf
from ..models.fenced import FencedModel
from ..storage.connections import ConnectionPool
from ..storage.fences import RESYNC_PATIENCE, lift, too_low
from ..storage.vendors import LEDGERS

#: Rows that are read at once, and fences that are raised in one transaction.
BATCH = 500
#: Seconds for raising one batch.
TIMEOUT = 60.0


@dataclass
class Resynced:
    """The result for one model's rows in one database."""

    model: str
    database: str
    #: Rows that were ever written under a lease.
    rows: int = 0
    #: Names whose fence was too low, with the highest token of a row.
    low: dict[str, int] = field(default_factory=dict)
    #: Those of `low` whose fence was not raised, because a transaction locks it.
    locked: list[str] = field(default_factory=list)
    #: Rows without a valid lock name.
    nameless: int = 0


def models(labels: Sequence[str] = ()) -> list[type[FencedModel]]:
    """Return the named fenced models, or all. Raise `LookupError` if one is no fenced model."""
    if not labels:
        fenced = [model for model in apps.get_models() if issubclass(model, FencedModel)]
        # A child whose rows have the names of its parent's is resynced with the parent.
        return [
            model
            for model in fenced
            if model is (table := model.fencing.table)
            or model.fencing.spec is not table.fencing.spec
        ]
    found: list[Any] = [apps.get_model(label) for label in labels]
    for model in found:
        if not issubclass(model, FencedModel):
            raise LookupError(
                f"{model._meta.label} isn't a fenced model. Name models that inherit from "
                "FencedModel, or none to resync all of them."
            )
    return found


def resync(model: type[FencedModel], *, dry_run: bool) -> Resynced:
    """Raise the fences of one model's rows."""
    spec = model.fencing.spec
    fences = conf.config(spec.backend).fence_database
    database = fences if spec.serialised else router.db_for_write(model)
    done = Resynced(model._meta.label, database)
    with contextlib.closing(ConnectionPool(fences, TIMEOUT)) as pool:
        for highest in _batches(model, database, done):
            low = pool.run_orm(partial(too_low, fences, highest))
            done.low |= {name: max(low[name], done.low.get(name, 0)) for name in low}
            if low and not dry_run:
                done.locked += sorted(set(_raise(pool, low)).difference(done.locked))
    return done


def _batches(model: type[FencedModel], database: str, done: Resynced) -> Iterator[dict[str, int]]:
    """Return the highest token of each lock name, batch by batch."""
    # One long query would need a transaction on some databases, and block writers on SQLite.
    rows: Any = model._base_manager.using(database).filter(fence__gt=0).order_by("pk")
    if model.fencing.columns is not None:
        rows = rows.only(*model.fencing.columns, "fence")
    batch = list(rows[:BATCH])
    while batch:
        highest: dict[str, int] = {}
        for row in batch:
            done.rows += 1
            name = None
            with contextlib.suppress(TypeError, ValueError):
                name = row.fencing.name()
            if name is None:
                done.nameless += 1
            else:
                highest[name] = max(row.fence, highest.get(name, 0))
        yield highest
        batch = list(rows.filter(pk__gt=batch[-1].pk)[:BATCH])


def _raise(pool: ConnectionPool, low: Mapping[str, int]) -> Iterator[str]:
    """Raise all fences that no transaction locks, and return the names of the others."""
    try:
        pool.run_orm(lambda: lift(pool.using, low), RESYNC_PATIENCE)
    except Error as exc:
        if not LEDGERS[connections[pool.using].vendor].is_row_locked(exc):
            raise
        if len(low) > 1:
            # One locked fence must not keep the others low.
            for name, token in low.items():
                yield from _raise(pool, {name: token})
        else:
            yield from low
