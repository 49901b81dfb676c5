"""The text that a value has in a lock's name: the same in every process, another for any other."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Set
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from django.db.models import Model


def canonical(value: Any) -> str:
    """
    Write `value` so that people can read it, and so that no other value is written alike.

    What a serialiser makes one counts as one: a worker gets a list for a tuple, the value for an
    enum's member, and text for a number that was a dict's key.
    """
    if isinstance(value, Enum):
        return canonical(value.value)
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float):
        return repr(float(value) if isinstance(value, float) else int(value))
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(canonical, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_key(key)}: {canonical(value[key])}' for key in value))}}}"
    if isinstance(value, Set):
        return f"set({', '.join(sorted(map(canonical, value)))})"
    if isinstance(value, Model):
        return _row(value)
    if hasattr(type(value), "model_dump"):  # pydantic, which Celery makes of a dict, and back
        return canonical(value.model_dump())
    return _scalar(value)


def _quoted(text: str) -> str:
    # As json.dumps() does with ensure_ascii=False, which makes an encoder for each call.
    readable = json.encoder.encode_basestring(text)
    try:
        readable.encode()
    except UnicodeEncodeError:
        return json.dumps(text)
    return readable


def _key(key: Any) -> str:
    if isinstance(key, Enum):
        return _key(key.value)
    # The rules of JSON, which has no other keys than text.
    if key is None or isinstance(key, bool | int | float):
        return _quoted(json.dumps(key))
    return canonical(key)


def _row(row: Model) -> str:
    if row.pk is None or row._state.adding:
        raise TypeError(
            f"A lock name can't be made of {row!r}, which isn't saved: it has no primary key that "
            "stays. Save it first, or name a plain value of it."
        )
    return f"{row._meta.concrete_model._meta.label_lower}:{canonical(row.pk)}"  # type: ignore[union-attr]


def _scalar(value: Any) -> str:
    if isinstance(value, UUID):
        return f"UUID({value})"
    if isinstance(value, Decimal):
        return f"Decimal({_number(value)})"
    if isinstance(value, datetime):
        # One moment has one name, wherever its clock hangs.
        moment = value if value.tzinfo is None else value.astimezone(UTC)
        return f"datetime({moment.isoformat()})"
    if isinstance(value, date | time):
        return f"{type(value).__name__}({value.isoformat()})"
    if isinstance(value, timedelta):
        return f"timedelta({_seconds(value)})"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"bytes({base64.b64encode(bytes(value)).decode()})"
    raise TypeError(
        f"A lock name can't be made of {value!r}: the text of a {type(value).__name__} isn't the "
        "same everywhere. Name the lock by a template over plain arguments, or by a callable "
        "(task, arguments) -> name."
    )


def _seconds(value: timedelta) -> str:
    # Not total_seconds(), a float, which long durations share with their neighbours.
    whole, rest = divmod(abs(value) // timedelta.resolution, 10**6)
    return f"{'-' if value < timedelta(0) else ''}{whole}.{rest:06d}"


def _number(value: Decimal) -> str:
    if not value.is_finite():
        return str(value)
    # Not normalize(), which rounds to the context's precision.
    sign, digits, exponent = value.as_tuple()
    text = "".join(map(str, digits)).lstrip("0")
    while text.endswith("0"):
        text, exponent = text[:-1], exponent + 1  # type: ignore[operator]
    if not text:
        return "0"
    number = f"{'-' if sign else ''}{text}E{exponent}"
    return f"{Decimal(number):f}" if abs(exponent) <= _READABLE else number  # type: ignore[arg-type]


#: Zeros that a number may have at its end or after its point before it is written with an E.
_READABLE = 20
