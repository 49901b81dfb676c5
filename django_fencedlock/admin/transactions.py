"""Views of the admin that take or free locks, and so can't be inside of a transaction."""

from __future__ import annotations

from typing import Any

from django.db import connections, transaction


def outside(view: Any) -> Any:
    """
    Leave a view out of ATOMIC_REQUESTS, in every database.

    Else a fence would be written beside a transaction that SQLite lets nobody pass, a lock would
    last until the end of the request, and an error later on would undo what a page has told.
    """
    for using in connections:
        view = transaction.non_atomic_requests(using)(view)
    return view
