"""The text of a value in a lock name."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Mapping, Set
from datetime import UTC, date, datetime, time, timedelta
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from django.db.models import Model
from django.utils.crypto import salted_hmac

from ..core import names

#: Hexadecimal digits of a digest in a name.
DIGEST = 32
_SALT = "django_fencedlock.sensitive"
#: Rounds no decimal.
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
#: Powers of ten beyond which a decimal may be written with an E.
_READABLE = 20


def canonical(value: Any) -> str:
    """
    Return a readable text of `value`, which no other value has.

    Values that a serialiser makes equal have the same text: a worker gets a list for a tuple, the
    value for an enum's member, and text for a number that was a dict's key.
    """
    if isinstance(value, Enum):
        return canonical(value.value)
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float):
        return repr(float(value) if isinstance(value, float) else int(value))
    if isinstance(value, str):
        # A lone surrogate can't be encoded.
        text = json.dumps(value, ensure_ascii=False)
        return text.encode(errors="backslashreplace").decode()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(canonical, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_key(key)}: {canonical(value[key])}' for key in value))}}}"
    if isinstance(value, Set):
        return f"set({', '.join(sorted(map(canonical, value)))})"
    if isinstance(value, Model):
        return _row(value)
    if hasattr(type(value), "model_dump"):  # pydantic, which Celery converts to and from a dict
        return canonical(value.model_dump())
    return _scalar(value)


def _key(key: Any) -> str:
    # As in JSON, whose keys are texts.
    is_json = key is None or isinstance(key, bool | int | float)
    return canonical(json.dumps(key) if is_json else key)


def _row(row: Model) -> str:
    if row.pk is None or row._state.adding:
        raise TypeError(
            f"a lock name can't contain {row!r}, which isn't saved. Save it first, or pass a plain "
            "value of it."
        )
    return f"{row._meta.concrete_model._meta.label_lower}:{canonical(row.pk)}"  # type: ignore[union-attr]


def _scalar(value: Any) -> str:
    if isinstance(value, UUID | timedelta):
        return f"{type(value).__name__}({value})"
    if isinstance(value, Decimal):
        number = value.normalize(_EXACT) or Decimal()
        is_readable = abs(number.adjusted()) <= _READABLE
        return f"Decimal({number:f})" if is_readable else f"Decimal({number})"
    if isinstance(value, datetime):
        # One moment has one name in every time zone.
        moment = value if value.tzinfo is None else value.astimezone(UTC)
        return f"datetime({moment.isoformat()})"
    if isinstance(value, date | time):
        return f"{type(value).__name__}({value.isoformat()})"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"bytes({base64.b64encode(bytes(value)).decode()})"
    raise TypeError(
        f"a lock name can't contain {names.a_value_of(type(value))}, which has no fixed text. "
        "Write a template of plain values, or a callable (task, arguments) -> name."
    )


def digest(key: str, value: Any) -> str:
    """Return what a name has instead of a sensitive argument."""
    with contextlib.suppress(TypeError):
        # With the project's secret key: a plain digest of a card's number can be found by trial.
        found = salted_hmac(_SALT, canonical(value), algorithm="sha256").hexdigest()
        return f"#{found[:DIGEST]}"
    # Outside the block: the suppressed error shows the value.
    raise TypeError(
        f"Sensitive parameter {key!r} is {names.a_value_of(type(value))}, which has no fixed text "
        "for a lock name. Pass a plain value."
    )
