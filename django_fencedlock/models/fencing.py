"""How a model is fenced: the lock name of each row, the mode, and writes without a lock."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from datetime import UTC, datetime
from decimal import Decimal
from string import Formatter
from typing import Any, NamedTuple

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import format_number
from django.db.models import UniqueConstraint
from django.utils import timezone

from .. import conf
from ..core import names
from ..lease import Lease, current_lease
from ..lock_sets import LockSet, sort_names
from ..locks import Lock, lock
from .fields import confused_texts, is_text, target_of

SERIALISED, HIGH_WATER = "serialised", "high_water"
MODES = (SERIALISED, HIGH_WATER)
_SET_OPTIONS = ("ttl", "blocking_timeout", "backend", "required")
_LOCK_OPTIONS = (*_SET_OPTIONS, "shared")

#: The names of locks, each with look-ups that find its rows among others.
Rows = Sequence[tuple[str | None, Mapping[str, Any]]]

#: The arguments of `fencing.lock()` that name no column.
RESERVED = frozenset({*_LOCK_OPTIONS, "columns"})


class Fencing:
    """
    Names the lock of each row of a fenced model, as its class attribute ``fencing``.

    Args:
        lock: A template over the model's fields, ``"account:{account_id}"``, or a callable that
            makes a name of an instance. Without one, ``app_label.model:{pk}``.
        mode: ``"serialised"`` lets no write commit after a newer grant was recorded; this needs
            the fences in the row's own database. ``"high_water"`` compares with the row's own
            column alone: updates can get lost, only the row's token never goes down.
        without_lock: ``"reject"``, ``"warn"`` or ``"allow"`` writes without a lease; by default the
            setting ``FENCEDLOCK_WITHOUT_LOCK``.
        backend: The alias of the lock service that ``fencing.lock()`` uses.
        path: The names are paths, ``"warehouse/{warehouse_id}/shelf/{pk}"``; see `lock()`. A row is
            written inside ``lease.atomic()`` alone, which checks the locks above its own as well.
    """

    def __init__(
        self,
        lock: str | Callable[[Any], str | None] | None = None,
        *,
        mode: str = SERIALISED,
        without_lock: str | None = None,
        backend: str = conf.DEFAULT_ALIAS,
        path: bool = False,
    ) -> None:
        _require_known("mode", mode, MODES)
        if path and mode != SERIALISED:
            raise ImproperlyConfigured(
                f"Fencing(path=True, mode={mode!r}): a path has several tokens, and the row's "
                "column one of them. Remove mode=, or path=True."
            )
        if without_lock is not None:
            _require_known("without_lock", without_lock, conf.WITHOUT_LOCK)
        self.template = lock
        self.mode = mode
        self.serialised = mode == SERIALISED
        self.backend, self.path = backend, path
        self._without_lock = without_lock
        self._of_models: dict[type[models.Model], FencingOf] = {}

    @property
    def without_lock(self) -> str:
        """What is done with a write that no lease covers."""
        return self._without_lock or conf.without_lock()

    def __get__(self, instance: models.Model | None, owner: type[models.Model]) -> FencingOf:
        if (found := self._of_models.get(owner)) is None:
            found = self._of_models[owner] = FencingOf(self, owner)
        if instance is None:
            return found
        of_row = copy(found)
        of_row._instance = instance
        return of_row


def _require_known(argument: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        choices = ", ".join(map(repr, known))
        raise ImproperlyConfigured(f"Fencing({argument}={value!r}): it has to be one of {choices}.")


class Part(NamedTuple):
    """A part of a template: some text, and the field that follows it."""

    text: str
    field: models.Field[Any, Any] | None
    form: str = ""
    #: The characters that may end the value. In the value itself they are escaped: otherwise the
    #: keys ("a,b", "c") and ("a", "b,c") would have one name.
    end: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether different values have different texts: not 08:00 and 09:00 of a day."""
        is_number = isinstance(self.field, models.IntegerField) and self.form.endswith("d")
        return not self.form or is_number

    def named(self, values: Mapping[str, Any]) -> str:
        if self.field is None:
            return self.text
        value = _text(self.field, values[self.field.attname], self.form)
        for character in dict.fromkeys(f"%{self.end}") if self.end else ():
            value = value.replace(character, f"%{ord(character):02X}")
        return self.text + value


class FencingOf:
    """The fencing of one model, or of one of its rows."""

    _instance: models.Model | None = None

    def __init__(self, spec: Fencing, model: type[models.Model]) -> None:
        self.spec, self.model = spec, model
        meta: Any = model._meta
        fence = meta.get_field("fence")
        self.fence_column = fence.column
        #: The model whose table has the fence column: under inheritance, a parent.
        self.table: Any = fence.model._meta.concrete_model
        self.pk: tuple[models.Field[Any, Any], ...] = tuple(self.table._meta.pk_fields)
        default = f"{self.table._meta.label_lower}:{{pk}}"
        #: The template of the names; empty if a callable makes them.
        self.pattern = "" if callable(spec.template) else spec.template or default
        self.parts = _parts(model, self.table, self.pattern)
        if spec.path:
            names.path_names(self.pattern or "any")
            self.parts = [part._replace(end=f"{part.end}/") for part in self.parts]
        fields = {part.field.attname: part.field for part in self.parts if part.field is not None}
        #: The attributes that the name is made of; None if only a callable knows.
        self.columns = None if callable(spec.template) else tuple(fields)
        #: The attributes among them that are texts.
        self.texts = {column for column, field in fields.items() if is_text(field)}
        local = self.table._meta.local_concrete_fields
        exact = [part.field for part in self.parts if part.is_exact]
        #: Whether each row's lock is named by its primary key, and excluded by no other lock.
        self.is_of_own_pk = not spec.path and all(field in exact for field in self.pk)
        #: Whether rows of one lock have the same values in columns of the fence's own table, so
        #: that SQL finds rows by these. If not, each row's name is made from the row itself.
        self.finds_rows = self.columns is not None and all(
            field in local and field in exact for field in fields.values()
        )
        #: The fields that a write compares, in the fence's own table. Of the primary key, texts
        #: alone: other keys are equal only if they are the same.
        self.compared = [
            field
            for column, field in fields.items()
            if field in local and field in exact
            if field not in self.pk or column in self.texts
        ]

    def name(self) -> str | None:
        """Return the name of this row's lock; None while a field that it is made of is empty."""
        return self.name_of_row(self._instance)

    def name_of_row(self, row: Any) -> str | None:
        template = self.spec.template
        if callable(template):
            found = template(row)
            return None if found is None else self._validate(found)
        return self.name_of({column: self.value_of(row, column) for column in self.columns or ()})

    def value_of(self, row: Any, column: str) -> Any:
        value = getattr(row, column)
        if value is None and [column] == [field.attname for field in self.pk]:
            # A child that was made by hand has its key in its own table's column alone.
            return row.pk
        return value

    def name_of(self, values: Mapping[str, Any]) -> str | None:
        """Return the name of the lock of rows with these values, by attribute."""
        if not all(map(is_known, values.values())):
            return None
        return self._validate("".join([part.named(values) for part in self.parts]))

    def _validate(self, name: str) -> str:
        return names.path_name(names.validate(name)) if self.spec.path else names.validate(name)

    def rows_of(self, objs: Iterable[Any]) -> Rows:
        """Return the lock names of objects, each with look-ups that find its rows."""
        keys: dict[str | None, list[Any]] = {}
        columns: dict[str | None, Mapping[str, Any]] = {}
        for obj in objs:
            name = type(obj).fencing.name_of_row(obj)
            keys.setdefault(name, []).append(obj.pk)
            if self.columns is not None and self.finds_rows:
                columns[name] = {column: getattr(obj, column) for column in self.columns}
        return [(name, columns.get(name, {"pk__in": pks})) for name, pks in keys.items()]

    def why_incomparable(
        self, connection: BaseDatabaseWrapper, unique_fields: Sequence[str] | None
    ) -> str:
        """Return why a row that conflicts in these fields may be one of another lock, if it may."""
        meta: Any = self.model._meta
        keys: list[Any] = [unique_fields]
        if not self.spec.serialised:
            return "can't compare tokens of the rows, so mode 'high_water' rejects it"
        if unique_fields is None:
            # MySQL goes by any unique key of the table, also one over an expression.
            keys = [[field.name] for field in meta.concrete_fields if field.unique]
            keys += [each.fields for each in meta.constraints if isinstance(each, UniqueConstraint)]
            keys += [*meta.unique_together, ["pk"]]

        def columns(name: str) -> set[str]:
            fields = meta.pk_fields if name == "pk" else [meta.get_field(name)]
            return {field.attname for field in fields}

        found = [set().union(*map(columns, key)) for key in keys]
        if self.columns is None or not all(set(self.columns) <= key for key in found):
            named = ", ".join(self.columns or ("what names it",))
            return (
                f"might overwrite rows of another lock: {named} has to be among the unique fields "
                "that it goes by"
            )
        for field in self.compared:
            if field.attname in self.texts and (confused := confused_texts(connection, field)):
                return (
                    f"might overwrite rows of another lock, as the database takes {confused} in "
                    f"{field.name!r}: give it a db_collation that compares every character"
                )
        return ""

    def naming_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the values of an update() that are for columns of the lock's name."""
        fields = {key: field for key in values if (field := _field(self.model, key))}
        return {
            field.attname: value_in(field, values[key])
            for key, field in fields.items()
            if field.attname in (self.columns or ())
        }

    def lock(self, *key: Any, columns: Mapping[str, Any] | None = None, **arguments: Any) -> Lock:
        """
        Name the lock of a row: ``Invoice.fencing.lock(42)``, ``invoice.fencing.lock()``.

        Takes the row's primary key, or the columns that the template names, and the options of
        `lock()`. `columns` is for columns whose names are those of options.
        """
        options = {name: arguments.pop(name) for name in _LOCK_OPTIONS if name in arguments}
        label = self.model.__name__
        if len(key) > 1:
            raise TypeError(
                f"{label}.fencing.lock() takes one primary key, not {len(key)} arguments. If the "
                f"key has several columns, write {label}.fencing.lock({key!r})."
            )
        if not isinstance(columns, Mapping | None):
            raise TypeError(f"{label}.fencing.lock(): columns has to be a dict, not {columns!r}.")
        by_position = [("pk", each) for each in key]
        values = [*by_position, *arguments.items(), *(columns or {}).items()]
        given = ", ".join(name for name, _ in values) or "nothing"
        if self._instance is not None and values:
            raise TypeError(
                f"fencing.lock() of a row names itself; remove {given}, or write "
                f"{label}.fencing.lock(...)."
            )
        name = self._name_from(values, given) if self._instance is None else self.name()
        return self._lock(name, **options)

    def lock_all(self, rows: Iterable[Any], **options: Any) -> LockSet[Any]:
        """
        Name the locks of rows: ``with Invoice.fencing.lock_all(queryset) as leases:``.

        All of them are acquired, or none. `rows` is a queryset or objects. Takes the options of
        lock() except `shared`; `blocking_timeout` is for all of them together.
        """
        if self.spec.path:
            raise TypeError(
                f"{self.model.__name__}.fencing.lock_all(): its locks are paths, which no set has. "
                "Write: with first.fencing.lock() as one, second.fencing.lock() as two:"
            )
        for unknown in options.keys() - {*_SET_OPTIONS}:
            what, has = f"{self.model.__name__}.fencing.lock_all()", ", ".join(_SET_OPTIONS)
            raise TypeError(f"{what} has no argument {unknown}; it has rows, {has}.")
        return RowLocks(self, rows, options)

    def names_of(self, rows: Iterable[Any], alias: str | None) -> list[str]:
        """Return the names of rows' locks in their order; require those of `alias`, if given."""
        label = self.model.__name__
        if isinstance(rows, models.QuerySet):
            # Not the queryset itself, which would keep rows that were read before the locks.
            rows = rows.all()
        model: Any = getattr(rows, "model", type)
        if issubclass(model, self.table) and hasattr(rows, "lock_names"):
            found: Iterable[str | None] = rows.lock_names()
            kinds: set[Any] = {model}
        else:
            rows = list(rows)
            wrong = [row for row in rows if not isinstance(row, self.table)]
            if wrong:
                raise TypeError(
                    f"{label}.fencing.lock_all() takes a queryset or objects of {label}, not "
                    f"{wrong[0]!r}. Write {label}.objects.filter(pk__in=[...])."
                )
            found = [name for name, _ in self.rows_of(rows)]
            kinds = {type(row) for row in rows}
        for kind in kinds:
            if alias is not None and kind.fencing.spec.backend != alias:
                raise ValueError(
                    f"{label}.fencing.lock_all() was given rows of {kind.__name__}, whose locks "
                    f"are of alias {kind.fencing.spec.backend!r}, not {alias!r}. One set has one "
                    "alias: lock them in two sets."
                )
        return sort_names(
            (name or self._lock(name).name for name in found), f"{label}.fencing.lock_all()"
        )

    def _lock(self, name: str | None, **options: Any) -> Lock:
        if name is None:
            empty = ", ".join(self.columns or ()) or "its name"
            label = self.model.__name__
            raise ValueError(f"This {label} has no lock yet: {empty} is empty. Save it first.")
        options = {"backend": self.spec.backend, "path": self.spec.path, **options}
        found = lock(names.read_path(name), **options)
        found.pattern = self.pattern
        return found

    def _name_from(self, arguments: Sequence[tuple[str, Any]], given: str) -> str | None:
        label, values = self.model.__name__, dict[str, Any]()
        if given == "pk" and isinstance(row := arguments[0][1], self.table):
            return type(row).fencing.name_of_row(row)  # type: ignore[no-any-return]
        for key, value in arguments:
            fields = self.pk if key == "pk" else [_field(self.model, key)]
            parts = value if key == "pk" and isinstance(value, tuple | list) else (value,)
            if len(parts) != len(fields) and value is not None:
                why = f"the primary key has {len(fields)} columns"
                raise TypeError(f"{label}.fencing.lock(pk={value!r}): {why}.")
            for field, part in zip(fields, parts, strict=False):
                column = field.attname if field else key
                if column in values:
                    raise TypeError(f"{label}.fencing.lock() was given {key} twice.")
                values[column] = self._checked(key, field, part)
        if self.columns is None or set(values) != set(self.columns):
            named = "a callable" if self.columns is None else ", ".join(self.columns)
            raise TypeError(
                f"The lock of {label} is named by {named or 'nothing'}; lock() was given {given}. "
                f"Write {self.usage()}."
            )
        return self.name_of(values)

    def _checked(self, key: str, field: Any, given: Any) -> Any:
        """Return a column's value for an argument. The lock of a wrong one would protect no row."""
        label = self.model.__name__
        value = value_in(field, given)
        if value is None:
            why = "is None" if given is None else "isn't saved yet"
            hint = names.NO_ID if given is None else "Save it first."
            raise ValueError(f"Argument {key} {why}, so it names no {label}. {hint}")
        if field is None:
            return value
        target = target_of(field)
        with contextlib.suppress(ValidationError):
            if not hasattr(value, "resolve_expression"):
                found = target.to_python(value)
                # int() takes 42.9 and b"42" for 42, and True for 1.
                is_same = found == value and not isinstance(value, bool)
                if is_same or type(found) is not int or isinstance(value, str):
                    return found
        raise ValueError(
            f"{label}.fencing.lock({key}={value!r}) names no row: that is not a valid value for "
            f"{field.name} ({type(target).__name__}). Pass the {target.name} of the "
            f"{target.model.__name__}."
        )

    def may_need_lease(self, given: Lease | None) -> bool:
        """Whether a write can need a lease; if not, no name is made."""
        return given is not None or current_lease() is not None or self.spec.without_lock != "allow"

    def usage(self, values: Mapping[str, Any] | None = None) -> str:
        """Return how the lock of a row is written in code, with the values that are known."""
        if self.columns is None:
            return "row.fencing.lock()"
        known = values or {}
        shown = {c: repr(known[c]) if is_known(known.get(c)) else "..." for c in self.columns}
        keys = [field.attname for field in self.pk]
        if set(self.columns) == set(keys):
            key = ", ".join(shown[column] for column in keys)
            shown = {"pk": key if len(keys) == 1 else f"({key})"}
        given = ", ".join(f"{column}={value}" for column, value in shown.items())
        if RESERVED.intersection(shown):
            given = "columns={" + ", ".join(f'"{key}": {shown[key]}' for key in shown) + "}"
        return f"{self.model.__name__}.fencing.lock({given})"


class RowLocks(LockSet):
    """The locks of rows. Their names are read each time that they are acquired."""

    def __init__(self, fencing: FencingOf, rows: Iterable[Any], options: Mapping[str, Any]) -> None:
        self._fencing, self._rows = fencing, rows
        # It checks the options.
        first = fencing._lock(fencing.model._meta.label_lower, **options)
        super().__init__(
            (),
            ttl=first._ttl,
            blocking_timeout=options.get("blocking_timeout", conf.UNSET),
            backend=first.backend,
            fenced=True,
            required=first.required,
        )
        self.pattern = fencing.pattern
        self._is_alias_given = "backend" in options

    @property
    def _title(self) -> str:
        return f"{self._fencing.model.__name__}.fencing.lock_all()"

    def _find_names(self) -> Sequence[str]:
        return self._fencing.names_of(self._rows, None if self._is_alias_given else self.backend)

    async def _afind_names(self) -> Sequence[str]:
        return await sync_to_async(self._find_names)()


def is_known(value: Any) -> bool:
    """Whether a value can be a part of a lock's name."""
    return value is not None and not hasattr(value, "resolve_expression")


def value_in(field: models.Field[Any, Any] | None, value: Any) -> Any:
    """Return the value in a column for what Django accepts for it: an instance, or the value."""
    if field is None or not isinstance(value, models.Model):
        return value
    if isinstance(field, models.ForeignKey):
        expected: Any = field.remote_field.model
        if not isinstance(value, expected):
            raise TypeError(f"{field.name} has to be {expected.__name__}, not {value!r}.")
        return getattr(value, field.target_field.attname)
    # The key of a row of another model would name another lock.
    kind = type(field).__name__
    raise TypeError(f"{field.name} has to be a value of {kind}, not {value!r}.")


def _parts(model: type[models.Model], table: Any, template: str) -> list[Part]:
    """Return the parts of a template, each with the character that ends its value."""
    label, pk = f"Fencing({template!r}) of {model._meta.label}", table._meta.pk_fields
    parts: list[Part] = []
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as exc:
        raise ImproperlyConfigured(f"{label} is not a valid template: {exc}.") from exc
    for text, name, form, _ in parsed:
        field = None if name is None else _field(model, name)
        if field is None and name not in (None, "pk"):
            raise ImproperlyConfigured(f"{label} uses {{{name}}}, which is not a column of it.")
        if field is not None and field not in pk and _is_made_late(field):
            raise ImproperlyConfigured(
                f"{label} uses {{{name}}}, whose value is made when the row is saved. The lock "
                "has to be known before that. Use columns that your code sets."
            )
        keys = pk if name == "pk" else (field,)
        parts += [Part("," if place else text, key, form or "") for place, key in enumerate(keys)]
    for place, (part, after) in enumerate(itertools.pairwise(parts)):
        if part.field is not None and after.field is not None:
            end = next((each for each in after.text if not each.isalnum()), "")
            if not end:
                both = f"{{{part.field.attname}}} and {{{after.field.attname}}}"
                raise ImproperlyConfigured(
                    f"{label} has nothing between {both} to separate them. Write a character "
                    "there, such as ':'."
                )
            parts[place] = part._replace(end=end)
    return parts


def _is_made_late(field: Any) -> bool:
    """Whether a field's value is made only when the row is written."""
    times = (models.DateField, models.DateTimeField, models.TimeField)
    plain = [models.Field.pre_save, *(each.pre_save for each in times)]
    flags = ("generated", "auto_now", "auto_now_add")
    return any(getattr(field, flag, False) for flag in flags) or type(field).pre_save not in plain


def _field(model: type[models.Model], name: str) -> models.Field[Any, Any] | None:
    fields = model._meta.concrete_fields
    return next((each for each in fields if name in (each.name, each.attname)), None)


def _text(field: Any, value: Any, form: str) -> str:
    """Return the text of a value, the same for all values that the column takes for the same."""
    if type(value) is int and isinstance(field, models.IntegerField) and not form:
        return str(value)
    field = target_of(field)
    with contextlib.suppress(ValidationError):  # Django has an error of its own for those.
        value = field.to_python(value)
    if isinstance(field, models.DecimalField) and isinstance(value, Decimal):
        places = Decimal(str(format_number(value, field.max_digits, field.decimal_places)))
        value = places if places else abs(places)
    elif isinstance(value, datetime):
        if settings.USE_TZ and timezone.is_naive(value):
            value = timezone.make_aware(value)
        if timezone.is_aware(value):
            value = value.astimezone(UTC)
    return names.format_value(value, form)
