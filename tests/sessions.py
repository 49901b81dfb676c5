"""Session locks of PostgreSQL that another process seems to hold."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from django_fencedlock.backends.postgres.holding import SessionLocks


@contextlib.contextmanager
def as_in_another_process() -> Iterator[None]:
    with mock.patch.object(SessionLocks, "find", return_value=None):
        yield
