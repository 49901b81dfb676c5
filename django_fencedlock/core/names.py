"""Lock names: what is a valid one, and how a template makes one of a call's arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from string import Formatter
from typing import Any
from uuid import UUID

MAX_LENGTH = 200

_PLAIN = (str, int, Decimal, UUID, date, datetime, time, Enum)


def validate(name: object) -> str:
    """Return `name` if every backend and database can tell it from every other name."""
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


def plain(value: Any, form: str = "") -> str:
    """The text of a value in a name, if it is the same in every process."""
    _be_plain(value)
    if isinstance(value, Enum):
        return plain(value.value, form)
    if form:
        _be_short(value, form)
    return format(value, form)


def _be_plain(value: Any) -> None:
    if not isinstance(value, _PLAIN):
        raise TypeError(
            f"A lock name can't be made of {value!r}: the text of a {type(value).__name__} "
            "isn't the same everywhere. Name a plain part of it, such as {order.pk}."
        )


def _be_short(value: Any, form: str) -> None:
    """Refuse a text beyond any name's length before it is made: it may be as long as memory."""
    longest = max([0, *(int(digits[:10]) for digits in re.findall(r"\d+", form))])
    if isinstance(value, Decimal) and value.is_finite():
        longest = max(longest, abs(value.adjusted()))
    if longest > MAX_LENGTH:
        raise ValueError(
            f"A lock name can't be made by the format {form[:40]!r} of a {type(value).__name__}: "
            f"its text would have more than {MAX_LENGTH} characters."
        )


class Template:
    """A lock name with the parameters of a function in braces, as in ``"invoice:{pk}"``."""

    def __init__(self, text: str, function: Callable[..., Any]) -> None:
        self.text = text
        self._parameters = Parameters(function)
        self._where = getattr(function, "__qualname__", repr(function))
        self._check()
        self._parts = _simple_parts(text)

    def _check(self) -> None:
        known = self._parameters.signature.parameters
        try:
            fields = list(_fields(self.text))
        except ValueError as exc:
            raise ValueError(f"Lock name {self.text!r} is no template: {exc}.") from exc
        for field in fields:
            first = re.split(r"[.\[]", field)[0]
            if first not in known:
                raise TypeError(
                    f"Lock name {self.text!r} names {{{field}}}, which is no parameter of "
                    f"{self._where}(); it has {', '.join(known) or 'none'}."
                )
            if "._" in field:
                raise TypeError(
                    f"Lock name {self.text!r} names {{{field}}}: what begins with an underscore is "
                    "nobody else's business. Name a public part of the argument."
                )
        validate(self.text)

    def render(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Make the name for one call; defaults apply, so that ``f(1)`` and ``f(a=1)`` are one."""
        return self.fill(self._parameters.bind(args, kwargs))

    def fill(self, arguments: Mapping[str, Any]) -> str:
        """Make the name for arguments that are bound to their parameters."""
        if self._parts is not None:
            made = [
                literal if field is None else literal + plain(arguments[field], form)
                for literal, field, form in self._parts
            ]
            return validate("".join(made))
        return validate(_PlainFormatter().vformat(self.text, (), arguments))


class Parameters:
    """Binds the arguments of calls to a function's parameters, defaults among them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.signature = inspect.signature(function)
        self._where = getattr(function, "__qualname__", repr(function))
        known = self.signature.parameters.values()
        # What most functions have: whatever may be given by its place or by its name.
        simple = all(each.kind is each.POSITIONAL_OR_KEYWORD for each in known)
        self._names = tuple(each.name for each in known) if simple else None
        self._defaults = {
            each.name: each.default for each in known if each.default is not each.empty
        }

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Bind the arguments of one call, in the order of the parameters."""
        if self._names is not None and len(args) <= len(self._names):
            rest = self._names[len(args) :]
            named = {**self._defaults, **kwargs}
            if kwargs.keys() <= set(rest) <= named.keys():
                found = dict(zip(self._names, args, strict=False))
                found.update((name, named[name]) for name in rest)
                return found
        # Slow, and knows what is wrong.
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(f"{self._where}(): {exc}") from None
        bound.apply_defaults()
        return dict(bound.arguments)


def _fields(text: str) -> Iterator[str]:
    """What a template names, in its formats as well."""
    for _, field, form, _ in Formatter().parse(text):
        if field is not None:
            yield field
            yield from _fields(form or "")


def _simple_parts(text: str) -> list[tuple[str, str | None, str]] | None:
    """The parts of a template that has nothing but parameters in braces; None for any other."""
    parts = list(Formatter().parse(text))
    simple = all(
        field is None or (field.isidentifier() and not conversion and "{" not in (form or ""))
        for _, field, form, conversion in parts
    )
    return [(literal, field, form or "") for literal, field, form, _ in parts] if simple else None


class _PlainFormatter(Formatter):
    """Formats values whose text is the same in every process, and no others."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            # A conversion makes a text of anything.
            _be_plain(value)
            value = value.value if isinstance(value, Enum) else value
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        return plain(value, format_spec)
