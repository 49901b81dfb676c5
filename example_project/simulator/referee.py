"""
The referee: creates the tables and the counter, and reports the state of service and counter.

It connects directly, without a proxy, and cleans up when the simulation has ended.
"""

import shutil
import sys
import time
from datetime import UTC, datetime
from typing import Any

from django.core.management import call_command
from django.db import Error, connection

from django_fencedlock import Holder, lock
from django_fencedlock.exceptions import BackendUnavailable

from .puppet import begin, obey, say


class Referee:
    def __init__(self, directory: str) -> None:
        from django.conf import settings

        self._directory = directory
        self._schema: str = settings.SIMULATOR_SCHEMA
        self._redis_url: str = settings.SIMULATOR_REDIS_URL
        self._key_prefix: str = settings.FENCEDLOCK["default"].get("KEY_PREFIX", "")

    def prepare(self) -> None:
        """Create the tables."""
        if self._schema:
            with self._server() as cursor:
                cursor.execute(f"CREATE SCHEMA {self._schema}")
        call_command("migrate", verbosity=0)
        say("prepared")

    def count(self, run: str, fencing: str) -> None:
        """Set a counter to 0 for a new run."""
        from .models import COUNTERS

        COUNTERS[fencing].objects.create(run=run)
        say("counting", run=run)

    def look(self, run: str, fencing: str) -> None:
        """Report the counter's value, and the holder according to the lock service."""
        from .models import COUNTERS, LOCK

        since = time.monotonic()
        try:
            holder = lock(LOCK.format(run=run)).holder()
            token = None if holder is None else holder.token or self._recorded(holder)
            row = COUNTERS[fencing].objects.filter(pk=run).first()
        except (BackendUnavailable, Error) as exc:
            say("looked", run=run, since=since, message=str(exc))
            return
        left = None
        if holder is not None and holder.expires_at is not None:
            left = (holder.expires_at - datetime.now(UTC)).total_seconds()
        value = None if row is None else row.value
        say("looked", run=run, since=since, token=token, left=left, value=value)

    def _recorded(self, holder: Holder) -> int | None:
        """Return the token of a holder whose service has none, such as Redlock."""
        from django_fencedlock.models import Fence

        fences = Fence.objects.filter(owner=holder.owner_id)
        return fences.values_list("token", flat=True).first()

    def empty(self) -> None:
        """Delete this simulation's lock and counter of tokens from Redis."""
        keys = self._forget_keys()
        say("emptied", keys=keys)

    def tidy_up(self) -> None:
        """Remove schema, keys and files."""
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._schema:
            cascade = "CASCADE" if connection.vendor == "postgresql" else ""
            with self._server() as cursor:
                cursor.execute(f"DROP SCHEMA IF EXISTS {self._schema} {cascade}")
        if self._redis_url:
            self._forget_keys()

    def _server(self) -> Any:
        """Return a cursor that needs no schema. In MySQL, a schema is a database."""
        return connection._nodb_cursor() if connection.vendor == "mysql" else connection.cursor()

    def _forget_keys(self) -> int:
        import redis

        with redis.Redis.from_url(self._redis_url, socket_timeout=5) as client:
            found = list(client.scan_iter(match=f"*{self._key_prefix}:*", count=1000))
            return client.delete(*found) if found else 0


def main() -> None:
    # Without die_with(): it must clean up, and it is never stopped.
    begin()
    referee = Referee(directory=sys.argv[2])
    commands = {
        "prepare": referee.prepare,
        "count": referee.count,
        "look": referee.look,
        "empty": referee.empty,
    }
    obey(commands, at_end=referee.tidy_up)


if __name__ == "__main__":
    main()
