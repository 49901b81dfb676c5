"""Lock names: which are valid, and templates that make them from arguments."""

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
    """Return `name` if every backend and database can store and compare it exactly."""
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


def format_value(value: Any, spec: str = "") -> str:
    """Return the text of a value in a name. It must be the same in every process."""
    _require_plain(value)
    if isinstance(value, Enum):
        return format_value(value.value, spec)
    if spec:
        _require_short(value, spec)
    return format(value, spec)


def _require_plain(value: Any) -> None:
    if not isinstance(value, _PLAIN):
        raise TypeError(
            f"A lock name can't be made of {value!r}: the text of a {type(value).__name__} "
            "isn't the same everywhere. Name a plain part of it, such as {order.pk}."
        )


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
    """A lock name with parameters of a function in braces, such as ``"invoice:{pk}"``."""

    def __init__(self, text: str, function: Callable[..., Any]) -> None:
        self.text = text
        self._parameters = Parameters(function)
        known = self._parameters.signature.parameters
        try:
            fields = list(_fields(text))
        except ValueError as exc:
            raise ValueError(f"Lock name {text!r} isn't a valid template: {exc}.") from exc
        for field in fields:
            if re.split(r"[.\[]", field)[0] not in known:
                raise TypeError(
                    f"Lock name {text!r} names {{{field}}}, which isn't a parameter of "
                    f"{self._parameters.function}(). Its parameters: {', '.join(known) or 'none'}."
                )
            if "._" in field:
                raise TypeError(
                    f"Lock name {text!r} names {{{field}}}, a private attribute. Name a "
                    "public part of the argument."
                )
        validate(text)

    def render(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return the name for one call. Defaults apply: ``f(1)`` and ``f(a=1)`` have one name."""
        return self.fill(self._parameters.bind(args, kwargs))

    def fill(self, arguments: Mapping[str, Any]) -> str:
        """Return the name for bound arguments."""
        return validate(_PlainFormatter().vformat(self.text, (), arguments))


class Parameters:
    """Binds the arguments of calls to a function's parameters, including defaults."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = getattr(function, "__qualname__", repr(function))
        self.signature = inspect.signature(function)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Bind the arguments of one call, in the order of the parameters."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(f"{self.function}(): {exc}") from None
        bound.apply_defaults()
        return dict(bound.arguments)


def _fields(text: str) -> Iterator[str]:
    """Yield what a template names, in its formats as well."""
    for _, field, spec, _ in Formatter().parse(text):
        if field is not None:
            yield field
            yield from _fields(spec or "")


class _PlainFormatter(Formatter):
    """Formats only values whose text is the same in every process."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            # A conversion makes a text of any object.
            _require_plain(value)
            value = value.value if isinstance(value, Enum) else value
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        return format_value(value, format_spec)
