"""What log records carry beside their text: the attributes that handlers and filters may use."""

from __future__ import annotations

import logging
from typing import Any

# A record has attributes of its own, such as "name": hence what these begin with.
PREFIX = "lock_"
#: Whatever a record may carry, without its beginning. A record has those that are known.
KEYS = frozenset(
    {
        *("name", "alias", "token", "owner", "holder", "reason", "waited", "held_for", "by"),
        *("model", "pk", "row_token", "task"),
    }
)


def facts(**known: Any) -> dict[str, Any]:
    """The ``extra`` of a log record."""
    return {f"{PREFIX}{key}": value for key, value in known.items() if value is not None}


def about(lease: Any, **known: Any) -> dict[str, Any]:
    """The ``extra`` of a log record about a lease."""
    return facts(
        name=lease.name,
        alias=lease.alias,
        token=lease.token if lease.fenced else None,
        owner=lease.owner_id,
        **known,
    )


def left_to_run_out(
    logger: logging.Logger, name: str, error: BaseException, known: dict[str, Any]
) -> None:
    """Log, with the ``extra`` that is known, that a lock couldn't be given back."""
    logger.warning(
        "Lock %r couldn't be given back, and is left to run out: %s",
        name,
        error,
        extra={**known, **facts(reason=str(error))},
    )
