"""Lock names: which are valid, and templates that make them from arguments."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from string import Formatter
from types import NoneType, SimpleNamespace, UnionType
from typing import Any
from uuid import UUID

MAX_LENGTH = 200
#: Names that a message lists at most.
SHOWN = 6
#: What to do if None is given for a row.
NO_ID = "Save the object first, or check that the id isn't None."

#: The largest `limit` of a lock.
MAX_PERMITS = 1000
#: The end of a permit's lock name. No other lock has a name that ends like this, or nearly so.
_PERMIT = re.compile(r" \[permit ([1-9][0-9]{0,3})\]\Z")
_LIKE_PERMIT = re.compile(r" \[permit [0-9]+\]\Z")

#: The end of the lock names of a path. No other lock has a name that ends like this.
_PATH = " [path]"
#: The most names that a path has.
MAX_LEVELS = 50

_PLAIN = (str, int, float, Decimal, UUID, date, datetime, time, timedelta, Enum, NoneType)


def validate(name: object) -> str:
    """Return `name` if it may name a lock: databases can store it, and no other kind has it."""
    name = validate_any(name)
    if is_path(name):
        raise ValueError(
            f"Lock name {name!r} ends like the name of a path. Acquire a path by "
            f"lock({name[: -len(_PATH)]!r}, path=True), or choose another name."
        )
    if name.endswith("]") and (found := _LIKE_PERMIT.search(name)):
        raise ValueError(
            f"Lock name {name!r} ends like the name of a permit. Acquire a permit by "
            f"lock({name[: found.start()]!r}, limit=...), or choose another name."
        )
    return name


def validate_any(name: object) -> str:
    """Return `name` of a lock or a permit, if every database can store and compare it exactly."""
    if not isinstance(name, str):
        raise TypeError(f"A lock name is a str, not {type(name).__name__}: {name!r}.")
    if not name:
        raise ValueError("A lock name can't be empty.")
    if len(name) > MAX_LENGTH:
        raise ValueError(
            f"Lock name {name[:40]!r}... has {len(name)} characters; {MAX_LENGTH} are allowed. "
            "Hash the long part."
        )
    if "\0" in name:
        raise ValueError(f"Lock name {name!r} has a NUL character, which Postgres can't store.")
    try:
        name.encode()
    except UnicodeEncodeError as exc:
        raise ValueError(f"Lock name {name!r} isn't valid Unicode: {exc.reason}.") from exc
    return name


def held_as(name: str, permits: int | None) -> str:
    """Return the name by which a holder has a lease: all permits of a lock have the same."""
    if permits is None:
        return name
    permit = read_permit(name)
    # No lock has a name that ends like this.
    return permit_name(permit[0] if permit else name, 0)


def count_permits(name: str, limit: object) -> int:
    """Return how many permits lock `name` has by `limit`, which may be a callable."""
    found = limit() if callable(limit) else limit
    what = f"The limit{f' of lock {name!r}' if name else ''} is {found!r}"
    if callable(limit):
        what += f", as {getattr(limit, '__qualname__', limit)}() returned"
    if isinstance(found, bool) or not isinstance(found, int):
        raise TypeError(f"{what}. It must be a whole number from 1 to {MAX_PERMITS}.")
    if not 1 <= found <= MAX_PERMITS:
        raise ValueError(f"{what}. It must be from 1 to {MAX_PERMITS}.")
    if len(permit_name(name, MAX_PERMITS)) > MAX_LENGTH:
        longest = MAX_LENGTH - len(permit_name("", MAX_PERMITS))
        raise ValueError(
            f"Lock name {name[:40]!r}... has {len(name)} characters; with limit=, {longest} are "
            "allowed. Hash the long part."
        )
    return found


def permit_name(name: str, number: int) -> str:
    """Return the lock name of a permit of `name`; the first has the number 1."""
    return f"{name} [permit {number}]"


def read_permit(name: str) -> tuple[str, int] | None:
    """Return the name and the number of a permit by its lock name; None for any other lock."""
    found = _PERMIT.search(name)
    return (name[: found.start()], int(found[1])) if found else None


@functools.lru_cache(1024)
def path_names(path: str) -> tuple[str, ...]:
    """Return the lock names of a path: those of its ancestors, root first, and its own."""
    parts = path.split("/")
    if not all(parts):
        raise ValueError(
            f"Path {path!r} has an empty part. Write it without a slash at either end, and with "
            "one slash between parts: 'warehouse/7/shelf/3'."
        )
    if len(parts) > MAX_LEVELS:
        raise ValueError(
            f"Path {path[:40]!r}... has {len(parts)} parts; {MAX_LEVELS} are allowed. Each part "
            "is a lock of its own. Join parts that aren't locked by themselves."
        )
    if len(path) + len(_PATH) > MAX_LENGTH:
        raise ValueError(
            f"Path {path[:40]!r}... has {len(path)} characters; {MAX_LENGTH - len(_PATH)} are "
            "allowed. Hash the long part."
        )
    return tuple("/".join(parts[: place + 1]) + _PATH for place in range(len(parts)))


def require_parts(path: str, template: str) -> str:
    """Return a path that was made of a template; raise if it has other parts."""
    if path.count("/") != template.count("/"):
        raise ValueError(
            f"Path {path!r} has other parts than its template {template!r}: an argument contains "
            "'/', and would name a lock of another level. Replace the '/' in it."
        )
    return path


def path_name(path: str) -> str:
    """Return the lock name of the end of a path."""
    return path_names(path)[-1]


def is_path(name: str) -> bool:
    """Whether a lock name is one of a path's."""
    return name.endswith(_PATH)


def read_path(name: str) -> str:
    """Return the path that a lock name stands for; another name as it is."""
    return name.removesuffix(_PATH)


def format_value(value: Any, spec: str = "") -> str:
    """Return the text of a value in a name. It must be the same in every process."""
    value = _plain(value)
    if not isinstance(value, _PLAIN):
        raise TypeError(
            f"A lock name can't contain {a_value_of(type(value))}, which has no fixed text. Use a "
            "plain value of it."
        )
    if value is None:
        return "None"
    if spec:
        _require_short(value, spec)
    return format(value, spec)


def _plain(value: Any) -> Any:
    """Return the value of an enum's member, and 0.0 for -0.0, which databases take for equal."""
    while isinstance(value, Enum):
        value = value.value
    return float(value) + 0.0 if isinstance(value, float) else value


def _require_short(value: Any, spec: str) -> None:
    """Reject a format before it fills the memory: its width may be any number."""
    longest = max([0, *(int(digits[:10]) for digits in re.findall(r"\d+", spec))])
    if isinstance(value, Decimal) and value.is_finite():
        longest = max(longest, abs(value.adjusted()))
    if longest > MAX_LENGTH:
        raise ValueError(
            f"A lock name can't be made by the format {spec[:40]!r} of a {type(value).__name__}: "
            f"its text would have more than {MAX_LENGTH} characters."
        )


class Template:
    """
    A lock name with parameters of a function in braces, such as ``"invoice:{pk}"``.

    Args:
        what: Names the template in an error.
        hidden: The parameters whose values are replaced by a text.
        keeps_value: The value of a template that is one field is used as it is, of any type.
    """

    def __init__(
        self,
        text: str,
        function: Callable[..., Any],
        *,
        what: str = "Lock name",
        hidden: Collection[str] = (),
        keeps_value: bool = False,
    ) -> None:
        self.text, self._what, self._function = text, f"{what} {text!r}", function
        self._parameters = Parameters(function)
        known = self._parameters.signature.parameters
        try:
            self._fields = list(_fields(text))
        except ValueError as exc:
            raise ValueError(
                f"Invalid lock name template {text!r}: {exc}. Write a parameter as {{invoice_id}}, "
                "and a brace as {{ or }}."
            ) from exc
        plain = _of_one_value(self._parameters.signature)
        braced = ":".join(f"{{{each}}}" if each in plain else each for each in text.split(":"))
        if not self._fields and braced != text:
            raise TypeError(
                f"{self._what} has no braces, so all calls of {self._parameters.function}() share "
                f'one lock. Write "{braced}", or rename it.'
            )
        # Of hidden ones nothing but a text is left.
        has_rest = self._parameters.rest not in ("", *hidden)
        for field in self._fields:
            self._require_known(field, known, has_rest)
            if "._" in field:
                raise TypeError(
                    f"{self._what} uses {{{field}}}, a private attribute. Use a public part of the "
                    "argument."
                )
        #: The parameters that it names.
        roots = {_root(field) for field in self._fields}
        self.names = {root if root in known else self._parameters.rest for root in roots}
        #: Whether its value is that of the one field that it is made of.
        self._is_field = keeps_value and [text] == [f"{{{field}}}" for field in self._fields]
        for field in () if self._is_field else self._fields:
            if field not in hidden and (kind := _kind_without_text(function, field)):
                raise self._no_text(field, kind)
        validate(text)

    def render(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return the name for one call. Defaults apply: ``f(1)`` and ``f(a=1)`` have one name."""
        return self.fill(self._parameters.bind(args, kwargs))

    def fill(self, arguments: Mapping[str, Any], first: object = None) -> str:
        """Return the name for arguments; `first` is the first parameter's, unless they have it."""
        return validate(self._text_of(self._all(arguments, first)))

    def value(self, arguments: Mapping[str, Any], first: object = None) -> Any:
        """Return a row's value: that of a template that is one field; otherwise its text."""
        values = self._all(arguments, first)
        for field in self._fields:
            if (value := self.look_up(field, values)) is None:
                raise ValueError(f"Argument {field} is None, so it names no row. {NO_ID}")
        return value if self._is_field else self._text_of(values)

    def look_up(self, field: str, values: Mapping[str, Any]) -> Any:
        """Return what a field names, such as ``order.pk``."""
        try:
            return Formatter().get_field(field, (), values)[0]
        except (AttributeError, LookupError, TypeError) as exc:
            why = str(exc)
            if isinstance(exc, KeyError):
                why = f"{'key' if _root(field) in values else 'argument'} {why} is missing"
            raise TypeError(
                f"{self._parameters.function}(): {self._what} needs {{{field}}}: {why}."
            ) from exc

    def plain_value(self, field: str, values: Mapping[str, Any]) -> Any:
        """Return what a field names, if its text is the same in every process."""
        value = _plain(given := self.look_up(field, values))
        if not isinstance(value, _PLAIN):
            raise self._no_text(field, type(given))
        return value

    def _text_of(self, values: Mapping[str, Any]) -> str:
        return _PlainFormatter(self).vformat(self.text, (), values)

    def _all(self, arguments: Mapping[str, Any], first: object) -> Mapping[str, Any]:
        """Return what fields name: also the keys of ``**kwargs``, and a bound function's object."""
        rest = arguments.get(self._parameters.rest)
        more = rest if isinstance(rest, Mapping) else {}
        return {**more, self._parameters.first: first, **arguments}

    def _require_known(self, field: str, known: Collection[str], has_rest: bool) -> None:
        name = _root(field)
        if name in known or (name.isidentifier() and has_rest):
            return
        if not name or name.isdigit():
            raise TypeError(
                f"Positional {{{field}}} is not supported. Name a parameter, such as "
                f"{{{example_of(self._function)}}}."
            )
        near = difflib.get_close_matches(name, known, 1)
        raise TypeError(
            f"{self._what} uses {{{field}}}, which is not a parameter of "
            f"{self._parameters.function}(). Parameters: {shown(known)}."
            + (f" Did you mean {{{near[0]}}}?" if near else "")
        )

    def _no_text(self, field: str, kind: type) -> TypeError:
        what = f"Parameter {field!r}" if field.isidentifier() else f"{{{field}}}"
        return TypeError(
            f"{what} is {a_value_of(kind)}, which has no fixed text for {self._what[:1].lower()}"
            f"{self._what[1:]}. {_instead(kind, field)}"
        )


def shown(given: Iterable[str]) -> str:
    """Return names for a message."""
    names = list(given)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more or "none"


def a_value_of(kind: type) -> str:
    """Return the name of a type with its article."""
    return f"{'an' if kind.__name__[0] in 'AEIOaeio' else 'a'} {kind.__name__}"


def _instead(kind: Any, field: str) -> str:
    """Return what to use instead of a value of a type that has no fixed text."""
    part = "[id]" if issubclass(kind, Mapping) else ".pk" if hasattr(kind, "pk") else ""
    if part:
        return f"Use a plain value of it, such as {{{field}{part}}}."
    # Not a part of it, such as {path.name}: two different values may have the same.
    return "Pass a plain value instead."


def _kind_without_text(function: Callable[..., Any], parameter: str) -> type | None:
    """Return the type of a parameter's values if its annotation shows that none has a text."""
    # A decorator below may convert the argument, and shows the annotations of what it wraps.
    if hasattr(function, "__wrapped__"):
        return None
    # By itself: another annotation may be a name that only type checkers import.
    with contextlib.suppress(Exception):
        own = SimpleNamespace(__annotations__={parameter: function.__annotations__[parameter]})
        return _without_text(typing.get_type_hints(own, function.__globals__)[parameter])
    return None


def _without_text(annotation: Any) -> type | None:
    kind = typing.get_origin(annotation) or annotation
    if kind in (typing.Union, UnionType):
        each = [_without_text(a) for a in typing.get_args(annotation) if a is not NoneType]
        return each[0] if all(each) else None
    if not isinstance(kind, type) or kind is Any:
        return None
    is_plain = any(issubclass(plain, kind) or issubclass(kind, plain) for plain in _PLAIN)
    return None if is_plain else kind


class Parameters:
    """Binds the arguments of calls to a function's parameters, including defaults."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = getattr(function, "__qualname__", repr(function))
        self.signature = inspect.signature(function)
        kinds = {each.kind: each.name for each in self.signature.parameters.values()}
        #: The name of ``**kwargs``; empty if there is none.
        self.rest = kinds.get(inspect.Parameter.VAR_KEYWORD, "")
        #: The first parameter, which a bound task has for itself; empty if there is none.
        self.first = next(iter(self.signature.parameters), "")

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Bind the arguments of one call, in the order of the parameters."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(f"{self.function}(): {exc}") from None
        bound.apply_defaults()
        return dict(bound.arguments)


def example_of(function: Callable[..., Any], *preferred: str) -> str:
    """Return a parameter of one value for an example, the first of `preferred` if it has one."""
    found = _of_one_value(inspect.signature(function))
    return next((each for each in (*preferred, *found) if each in found), "invoice_id")


def _of_one_value(signature: inspect.Signature) -> list[str]:
    many = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    known = signature.parameters.values()
    return [each.name for each in known if each.kind not in many and each.name != "self"]


def _root(field: str) -> str:
    """Return the parameter of a field such as ``order.pk`` or ``order[pk]``."""
    return re.split(r"[.\[]", field)[0]


def _fields(text: str) -> Iterator[str]:
    """Yield what a template names, in its formats as well."""
    for _, field, spec, _ in Formatter().parse(text):
        if field is not None:
            yield field
            yield from _fields(spec or "")


class _PlainFormatter(Formatter):
    """Formats only values whose text is the same in every process."""

    def __init__(self, template: Template) -> None:
        self._template = template

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return self._template.plain_value(field_name, kwargs), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return format_value(value, format_spec)
