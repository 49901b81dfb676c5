"""Session locks of Postgres: the server excludes, and records the grant in the same statement."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import AliasConfig, Problem, location_problems, timeout_problems
from ..core.identity import Holder, describe_place
from ..exceptions import BackendUnavailable
from ..lease import Lease
from ..storage.connections import pool
from ..storage.errors import is_table_missing
from ..storage.postgresql import array
from ..storage.vendors import Entry, Row, ledger_for
from .base import Renewal, Taken

try:
    import psycopg  # noqa: F401
except ImportError as exc:
    raise ImproperlyConfigured(
        f"The postgres backend needs psycopg 3, and psycopg2 won't do ({exc}). "
        "Run: pip install 'django-fencedlock[postgres]'"
    ) from exc

from . import postgres_statements as sql
from .postgres_home import Hold
from .postgres_hung import end_orphan
from .postgres_probe import probe
from .postgres_sessions import read_application_name
from .postgres_taking import TakesSessionLocks

T = TypeVar("T")


class PostgresBackend(TakesSessionLocks):
    """
    Advisory locks of private sessions: one session for all locks that were granted at once.

    A lock lives as long as its session. When that dies, exactly its locks are lost, at once. A
    lock that was waited for lives on the session that waited; beyond MAX_WAITERS of those one
    tries again and again, and can be overtaken.
    """

    label = "postgres"
    records_grants = True
    supports_waiting = True
    supports_ttl = False
    option_names = frozenset({"TIMEOUT", "MAX_LOCKS", "MAX_WAITERS", "DATABASE"})

    # Holding

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        held = [lease for lease in leases if self._home.is_held(lease.handle)]
        found: Mapping[str, Renewal] = {}
        if held:
            try:
                found = self._ask("renewal", partial(self._renew, held), renews=True)
            except BackendUnavailable:
                # A session that died with it has lost its leases by now.
                found = {
                    lease.owner_id: Renewal.UNKNOWN
                    for lease in held
                    if self._home.is_held(lease.handle)
                }
        return [found.get(lease.owner_id, Renewal.LOST) for lease in leases]

    def _renew(self, leases: Sequence[Lease]) -> Mapping[str, Renewal]:
        holds: dict[str, Hold] = {lease.owner_id: lease.handle for lease in leases}
        given = {
            "names": array([lease.name for lease in leases]),
            "owners": array([lease.owner_id for lease in leases]),
            "ttls": array([lease.ttl for lease in leases]),
            "keys": array([hold.key for hold in holds.values()]),
            "pids": array([hold.session.pid for hold in holds.values()]),
        }
        return {
            owner: self._renewal(holds[owner], *facts)
            for owner, *facts in self._home.session().all(sql.RENEW, given, prepare=False)
        }

    def _renewal(
        self, hold: Hold, held: bool, renewed: bool, recorded: bool, forced: bool
    ) -> Renewal:
        if held and not forced and (renewed or not hold.recorded):
            hold.listed = not hold.recorded
            return Renewal.KEPT
        if held and recorded:
            # Somebody has the row locked.
            return Renewal.UNKNOWN
        with contextlib.suppress(Error):
            self._release(hold)
        return Renewal.LOST

    def verify(self, lease: Lease) -> bool:
        hold: Hold = lease.handle
        if not self._home.is_held(hold):
            return False
        unfenced = sql.VERIFY_LISTED if hold.listed else sql.VERIFY_UNFENCED
        statement = sql.VERIFY if hold.recorded else unfenced
        ask = partial(hold.session.one, statement, hold.values())
        try:
            return all(self._ask("verification", ask, lease.name))
        except BackendUnavailable:
            if self._home.is_held(hold):
                raise
            # The session had ended, unnoticed until now.
            return False

    def release(self, lease: Lease) -> bool:
        hold: Hold = lease.handle
        if hold.lent is not None:
            # An error here has broken the test's transaction, and the row goes with it.
            with contextlib.suppress(Error):
                ledger_for(hold.lent).clear(hold.lent, [lease])
        return self._ask("release", partial(self._release, hold), lease.name)

    def evict(self, name: str, owner: str, *, fenced: bool = True) -> bool:
        # An unfenced lock has no row, and ends with its session alone.
        if not fenced:
            return False
        return self._on_private("eviction", name, lambda private: end_orphan(private, name, owner))

    def take_away(self, name: str, owner: str, *, token: int | None = None) -> Taken:
        # Nothing but its own session can release an advisory lock: the holder's process does, when
        # it next renews. A row without such a session is cleared.
        def clear(private: BaseDatabaseWrapper) -> Taken:
            with private.cursor() as cursor:
                cursor.execute(sql.EVICT, {"name": name, "owner": owner})
                session, cleared = cursor.fetchone()
            if session is not None:
                return Taken.LEFT_TO_HOLDER
            return Taken.FREED if cleared else Taken.NOT_HIS

        return self._on_private("forced release", name, clear)

    def _on_private(self, doing: str, name: str, work: Callable[[BaseDatabaseWrapper], T]) -> T:
        # Not asked of the session for locks: this process may hold none, now or ever.
        try:
            return pool(self.config.fence_database, self._timeout).run(work)
        except Error as exc:
            raise self.unavailable(doing, exc, name) from exc

    def entry(self, lease: Lease) -> Entry:
        hold: Hold = lease.handle
        return replace(
            super().entry(lease),
            session_pid=hold.session.pid,
            session_started=hold.session.started,
            session_key=hold.key,
        )

    # Looking

    def is_free(self, name: str) -> bool:
        key = self._key(name)
        if self._home.holding(key):
            return False
        (taken,) = self._look(name, sql.IS_TAKEN, {"key": key})[0]
        return not taken

    def holder(self, name: str) -> Holder | None:
        given = {"name": name, "key": self._key(name)}
        try:
            found = self._look(name, sql.HOLDER, given)
        except BackendUnavailable as exc:
            if not is_table_missing(exc):
                raise
            # Whoever uses unfenced locks alone needs no tables.
            found = self._look(name, sql.HOLDER_UNRECORDED, given)
        return self._holder(found[0]) if found else None

    def holders(self, names: Sequence[str]) -> dict[str, Holder | None]:
        given = {"names": list(names), "keys": [self._key(name) for name in names]}
        holders: dict[str, Holder | None] = dict.fromkeys(names)
        for name, pid, application, owner, token, acquired_at, expires_at, *place in self._look(
            None, sql.HOLDERS, given
        ):
            holders[name] = (
                Holder(
                    owner,
                    describe_place(*place),
                    self.config.alias,
                    token,
                    acquired_at,
                    expires_at,
                    pid,
                )
                if owner
                else self._stranger(pid, application)
            )
        return holders

    def waiting(self, names: Sequence[str]) -> dict[str, int]:
        given = {"names": list(names), "keys": [self._key(name) for name in names]}
        return {str(name): int(count) for name, count in self._look(None, sql.WAITING, given)}

    def _holder(self, found: tuple[Any, ...]) -> Holder:
        pid, application, *values = found
        facts = dict(zip((*sql.ROW, "token", "live"), values, strict=False))
        if facts.get("owner"):
            return replace(Row(**facts).holder(), session_pid=pid)
        return self._stranger(pid, application)

    def _stranger(self, pid: int, application: str | None) -> Holder:
        words = read_application_name(application)
        return Holder("", words, self.config.alias, session_pid=pid)

    def _look(
        self, name: str | None, statement: str, given: Mapping[str, Any]
    ) -> list[tuple[Any, ...]]:
        def look() -> list[tuple[Any, ...]]:
            return self._home.session().all(statement, given, prepare=name is not None)

        return self._ask("look", look, name)

    # Coming and going

    def close(self) -> None:
        self._room.close()
        self._home.close()

    def forget_after_fork(self) -> None:
        # Both see to it themselves, before anything else runs in the child.
        pass

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        yield from location_problems(config)
        yield from timeout_problems(config)
        options, where = config.options, config.where("OPTIONS")
        for option in ("MAX_LOCKS", "MAX_WAITERS"):
            if option in options and not _is_count(options[option]):
                found = f"{where}[{option!r}] is {options[option]!r}."
                yield Problem("E008", found, "Make it an int above 0.")
        yield from _route_problems(config)

    def live_problems(self) -> Iterator[Problem]:
        yield from probe(self.config, self._route, self._timeout, self._max_locks)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _route_problems(config: AliasConfig) -> Iterator[Problem]:
    option = f"{config.where('OPTIONS')}['DATABASE']"
    route = config.options.get("DATABASE", config.fence_database)
    if route not in settings.DATABASES:
        yield Problem(
            "E008",
            f"{option} is {route!r}, which DATABASES doesn't have.",
            f"Use one of {', '.join(map(repr, settings.DATABASES))}, or leave it out.",
        )
        return
    for where, alias in ((config.where("FENCE_DATABASE"), config.fence_database), (option, route)):
        if (vendor := connections[alias].vendor) != "postgresql":
            yield Problem(
                "E010",
                f"{where} is {alias!r}, a database of vendor {vendor!r}.",
                "Session locks need PostgreSQL. Name such a database, or use the backend "
                "'django_fencedlock.backends.database.DatabaseBackend'.",
            )
            return
