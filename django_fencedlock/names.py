"""Lock names: what is a valid one, and how a template makes one of a call's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
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
    if not isinstance(value, _PLAIN):
        raise TypeError(
            f"A lock name can't be made of {value!r}: the text of a {type(value).__name__} "
            "isn't the same everywhere. Name a plain part of it, such as {order.pk}."
        )
    return format(value.value if isinstance(value, Enum) else value, form)


class Template:
    """A lock name with the parameters of a function in braces, as in ``"invoice:{pk}"``."""

    def __init__(self, text: str, function: Callable[..., Any]) -> None:
        self.text = text
        self._signature = inspect.signature(function)
        self._where = getattr(function, "__qualname__", repr(function))
        self._check()

    def _check(self) -> None:
        known = self._signature.parameters
        try:
            parts = list(Formatter().parse(self.text))
        except ValueError as exc:
            raise ValueError(f"Lock name {self.text!r} is no template: {exc}.") from exc
        for _, field, _, _ in parts:
            if field is None:
                continue
            first = field.partition(".")[0].partition("[")[0]
            if first not in known:
                raise TypeError(
                    f"Lock name {self.text!r} names {{{field}}}, which is no parameter of "
                    f"{self._where}(); it has {', '.join(known) or 'none'}."
                )
        validate(self.text)

    def render(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Make the name for one call; defaults apply, so that ``f(1)`` and ``f(a=1)`` are one."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self.fill(bound.arguments)

    def fill(self, arguments: Mapping[str, Any]) -> str:
        """Make the name for arguments that are bound to their parameters."""
        return validate(_PlainFormatter().vformat(self.text, (), arguments))


class _PlainFormatter(Formatter):
    """Formats values whose text is the same in every process, and no others."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return plain(value, format_spec)
