"""The new rows of one bulk_create(): the leases that they go under, and their own columns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, models

from ..lease import Lease
from ..storage.fences import is_newest
from .comparing import is_text, may_take_for_equal, taken_for_equal
from .fencing import FencingOf
from .naming import tells_the_lock
from .writes import Write, leases_of, new_rows_fence, write_for_new_row


class NewRows:
    """
    Objects that are about to be added at once.

    Args:
        fencing: None for a model that isn't fenced.
        given: The lease that the queryset was told to write under.
    """

    def __init__(
        self,
        model: type[models.Model],
        objs: Sequence[Any],
        *,
        fencing: FencingOf | None,
        is_versioned: bool,
        using: str,
        given: Lease | None,
    ) -> None:
        self._model = model
        self._objs = objs
        self._fencing = fencing
        self._is_versioned = is_versioned
        self._using = using
        self._given = given
        self._is_covered = fencing is not None and fencing.may_need_lease(given)
        #: One for each object, if the model is fenced.
        self.writes: list[Write] = [] if fencing is None else self._gather(fencing)

    def _gather(self, fencing: FencingOf) -> list[Write]:
        if not self._is_covered:
            return [Write(fencing, self._using, None, {})] * len(self._objs)
        found: dict[str | None, Write] = {}
        writes = []
        for obj in self._objs:
            name = obj.fencing.name_to_write()
            if name not in found:
                found[name] = write_for_new_row(
                    obj.fencing, name, self._using, self._given, "Creating"
                )
            writes.append(found[name])
        return writes

    @property
    def are_leased(self) -> bool:
        return bool(leases_of(self.writes))

    def refuse_overwriting(self, unique_fields: Sequence[str] | None) -> None:
        """Refuse those that may take the place of rows that they can't be compared with."""
        label = self._model._meta.label
        if self._is_versioned:
            raise ImproperlyConfigured(
                f"bulk_create(update_conflicts=True) of {label} can't compare the versions of the "
                "rows that it overwrites, so it is refused."
            )
        if self._fencing is None or not self._is_covered:
            return
        for obj, write in zip(self._objs, self.writes, strict=True):
            if write.grant is None:
                # Adding is free, overwriting isn't.
                self._fencing.lease_for(obj.fencing.name_to_write(), None, "Overwriting")
        if not self.are_leased:
            return
        if not self._fencing.spec.serialised:
            raise ImproperlyConfigured(
                f"bulk_create(update_conflicts=True) of {label} can't compare tokens of the rows "
                "that it overwrites, so mode 'high_water' refuses it."
            )
        connection = connections[self._using]
        for field in self._fencing.plan.guarding:
            if is_text(field) and may_take_for_equal(connection, field):
                table = field.model._meta.db_table
                if alike := taken_for_equal(connection, table, str(field.column)):
                    raise ImproperlyConfigured(
                        f"bulk_create(update_conflicts=True) of {label}: the database takes "
                        f"{alike} in {field.name!r}, so it might overwrite rows of another lock. "
                        "Give the field a db_collation that compares every character."
                    )
        if not tells_the_lock(self._fencing, unique_fields):
            raise ImproperlyConfigured(
                f"bulk_create(update_conflicts=True) of {label} might overwrite rows of another "
                f"lock: {', '.join(self._fencing.columns or ('what names it',))} has to be among "
                "the unique fields that it goes by."
            )

    @contextlib.contextmanager
    def columns_kept(self) -> Iterator[None]:
        """Have the objects' own columns as they are in the rows, or as they were on failure."""
        columns = ["version"] if self._is_versioned else []
        columns += ["fence"] if self._fencing is not None else []
        before = [{column: obj.__dict__.get(column, 0) for column in columns} for obj in self._objs]
        self._begin_versions()
        try:
            yield
        except BaseException:
            for obj, values in zip(self._objs, before, strict=True):
                obj.__dict__.update(values)
            raise
        self._set_tokens()
        self._begin_versions()

    def have_checked(self) -> None:
        """Have the INSERT itself check each lease: once, as it is all in one transaction."""
        checked = set()
        self._set_tokens()
        for obj, write in zip(self._objs, self.writes, strict=False):
            if write.grant is not None and write.grant.owner not in checked:
                checked.add(write.grant.owner)
                obj.fence = new_rows_fence(write)

    def check_beforehand(self) -> None:
        """Check each lease, in the transaction of an INSERT that may ignore the constraint."""
        connection = connections[self._using]
        for write in {each.grant: each for each in leases_of(self.writes)}.values():
            grant = write.pin(connection)
            if grant is not None and not is_newest(self._using, grant):
                raise write.refusal().of_statement()
        self._set_tokens()

    def _set_tokens(self) -> None:
        for obj, write in zip(self._objs, self.writes, strict=False):
            obj.fence = 0 if write.grant is None else write.token

    def _begin_versions(self) -> None:
        if self._is_versioned:
            for obj in self._objs:
                obj.version = 0
