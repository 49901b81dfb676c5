"""The attributes of log records, for handlers and filters."""

from __future__ import annotations

import logging
from typing import Any

# Log records have attributes of their own, such as "name".
PREFIX = "lock_"
#: The attributes, without the prefix. A record has those that are known.
KEYS = frozenset(
    {
        *("name", "alias", "token", "owner", "holder", "reason", "waited", "held_for", "by"),
        *("model", "pk", "row_token", "task"),
    }
)


def facts(**known: Any) -> dict[str, Any]:
    """Return the ``extra`` of a log record."""
    return {f"{PREFIX}{key}": value for key, value in known.items() if value is not None}


def about(lease: Any, **known: Any) -> dict[str, Any]:
    """Return the ``extra`` of a log record about a lease."""
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
    """Log that a lock couldn't be released."""
    logger.warning(
        "Lock %r couldn't be released, and is left to expire: %s",
        name,
        error,
        extra={**known, **facts(reason=str(error))},
    )
