"""Session locks of MySQL and MariaDB: GET_LOCK excludes, and the same session records the grant."""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from django.db import Error, OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import AliasConfig, Problem
from ..core.identity import Process, is_process_gone
from ..core.runtime import clock
from ..exceptions import BackendUnavailable
from ..storage.connections import CURSOR, private
from ..storage.dialect import HELD, entry_of
from ..storage.fences import IS_FORCED
from ..storage.vendors import LEDGERS
from .interface import Claim, Grant, Granted, Held, Renewal
from .session_locks import SLICE, Hold, Session, SessionBackend, describe, execute, forced

#: Seconds that the server may take to end a session whose client is gone.
ENDS_WITHIN = 0.25
#: Seconds that a client waits for an answer at least: its own timeout ends the session, and with
#: it all locks. The server waits for 1 s for a row, and as long for a table.
ANSWERS_WITHIN = 3.0
#: The longest wait_timeout, in seconds.
LONGEST = 31_536_000
#: The error of KILL QUERY. MariaDB answers NULL while it waits for a lock.
INTERRUPTED = 1317

# The timeout is in whole seconds: MySQL rounds it. The last columns prove that this very session
# holds the lock: a proxy may send each statement to another session.
TRY = "SELECT GET_LOCK(%s, %s), IS_USED_LOCK(%s), CONNECTION_ID()"
RELEASE = "DO RELEASE_LOCK(%s)"
UNLOCK = f"SELECT RELEASE_LOCK(%s), {IS_FORCED.format(owner='%s')}"
VERIFY = f"""SELECT IS_USED_LOCK(%s) = CONNECTION_ID() AND NOT {IS_FORCED.format(owner="%s")}
AND (NOT %s OR EXISTS (SELECT 1 FROM {HELD} h WHERE h.name = %s AND h.owner = %s))"""
#: The session of an owner's row, the session that holds the key, and the owner's process.
HOLDER = f"""SELECT h.session_pid, IS_USED_LOCK(%s), h.boot_id, h.pid_namespace, h.pid,
h.pid_started FROM {HELD} h WHERE h.name = %s AND h.owner = %s"""
FACTS = """SHOW GLOBAL VARIABLES WHERE Variable_name IN ('wsrep_on', 'log_bin', 'binlog_format',
'group_replication_group_name', 'group_replication_single_primary_mode')"""
CLUSTER_SIZE = "SHOW GLOBAL STATUS WHERE Variable_name = 'wsrep_cluster_size'"
# A proxy answers "SELECT CONNECTION_ID()" itself, with the number of its own session.
CONNECTED = "SELECT CONNECTION_ID(), 1"
WAITS_FOR = re.compile(r"GET_LOCK\('(fl:\w+)'")


class MysqlBackend(SessionBackend):
    """GET_LOCK on private sessions of the fence database."""

    label = "mysql"
    _ledger = LEDGERS["mysql"]

    def _key(self, name: str) -> str:
        """Return the lock's key. MySQL's have 64 characters, and the case makes no difference."""
        text = f"{self.config.key_prefix}\0{name}".encode()
        return f"fl:{hashlib.blake2b(text, digest_size=16).hexdigest()}"

    # Called by a session's thread

    def _connect(self, session: Session) -> Any:
        own: Any = private(self.config.fence_database, self._timeout)
        # Until then, a lease may be good whose renewal the server is late to answer.
        within = SLICE * session.waits + max(min(session.ttl, LONGEST), ANSWERS_WITHIN)
        own.settings_dict["OPTIONS"]["read_timeout"] = math.ceil(within + self._timeout)
        try:
            own.ensure_connection()
            limit = "max_statement_time" if own.mysql_is_mariadb else "max_execution_time"
            execute(f"SET SESSION lock_wait_timeout = 1, {limit} = 0", (), own)
            # Each time: a cluster grows, and this session may be on another node than the last.
            if why := several_writers(_facts(own)):
                raise OperationalError(
                    f"database {self.config.fence_database!r} {why}, and each would grant the "
                    "lock. Use DatabaseBackend, or a single primary"
                )
            setattr(own, CURSOR, own.cursor())
            ((session.id, _),) = execute(CONNECTED, (), own)
        except BaseException:
            own.close()
            raise
        return own

    def _claim(self, session: Session, claim: Claim, key: str, seconds: float) -> Granted | Held:
        since = clock()
        try:
            _limit_silence(session, max(claim.ttl, session.silence))
            free, holder, connected = session.one(TRY, key, math.ceil(seconds), key)
            if free != 1:
                # Unknown if it was released a moment ago.
                row = self._ledger.look(session.connection, claim.name) if holder else None
                return describe(row, holder) if holder else Held()
            try:
                if not holder == connected == session.id:
                    raise OperationalError("a proxy sends its statements to several sessions")
                token = self._record(session, claim) if claim.fenced else None
            except BaseException:
                session.do(RELEASE, key)
                raise
        except Error as exc:
            if not session.closed and self._is_refusal(exc):
                return Held()
            raise
        if isinstance(token, Held):
            session.do(RELEASE, key)
            return token
        hold = Hold(claim, key, session, claim.ttl)
        return self._add(hold, Granted(token, since, hold))

    def _record(self, session: Session, claim: Claim) -> int | Held | None:
        """Record the grant of a lock that this session holds."""
        own, entry = session.connection, entry_of(claim, self.config.alias, self.label)
        entry.session_pid = session.id
        for _ in range(2):
            taken, token = self._ledger.claim(own, entry)
            if taken:
                return token
            row = self._ledger.look(own, claim.name)
            if row is not None and row.conflicts_with(self.config.alias, self.label):
                return describe(row)._replace(alias=row.alias, label=row.backend)
            if row is not None:
                # The lock was free, so the session of the row's owner has ended.
                self._ledger.clear(own, [Grant(claim.name, row.owner.id)])
        return Held()

    def _is_refusal(self, error: Error) -> bool:
        return error.args[:1] == (INTERRUPTED,) or self._ledger.is_row_locked(error)

    def _renew(self, session: Session, holds: Mapping[str, Hold]) -> dict[str, Renewal]:
        _limit_silence(session, max([hold.ttl for hold in session.holds], default=0.0))
        own = session.connection
        users = _users(own, [hold.key for hold in holds.values()])
        lost = {owner for owner, hold in holds.items() if users[hold.key] != session.id}
        lost |= forced(own, list(holds))
        kept = {owner: hold for owner, hold in holds.items() if owner not in lost}
        fenced = [hold.claim._replace(ttl=hold.ttl) for hold in kept.values() if hold.claim.fenced]
        renewed = self._ledger.renew(own, fenced) if fenced else set()
        lost |= self._ledger.missing(own, fenced, renewed)
        # A transaction may have a row locked.
        unknown = {each.owner for each in fenced} - renewed
        for owner in lost:
            with contextlib.suppress(Error):
                self._release(holds[owner])
        return (
            dict.fromkeys(kept, Renewal.KEPT)
            | dict.fromkeys(unknown, Renewal.UNKNOWN)
            | dict.fromkeys(lost, Renewal.LOST)
        )

    def _verify(self, hold: Hold) -> bool:
        name, owner, fenced = hold.claim.name, hold.claim.owner, hold.claim.fenced
        return bool(hold.session.one(VERIFY, hold.key, owner, fenced, name, owner)[0])

    def _unlock(self, hold: Hold) -> bool:
        session, claim = hold.session, hold.claim
        try:
            if claim.fenced:
                # First: the next holder finds no row. A row that is locked is left to it.
                try:
                    self._ledger.clear(session.connection, [claim])
                except Error as exc:
                    if not self._is_refusal(exc):
                        raise
            released, was_forced = session.one(UNLOCK, hold.key, claim.owner)
            return released == 1 and not was_forced
        except BaseException:
            session.do(RELEASE, hold.key)
            raise

    # Called by any thread

    def _cancel(self, session: Session) -> None:
        self._query("cancel a wait", partial(execute, f"KILL QUERY {session.id}", ()))

    def _evict(self, grant: Grant) -> bool:
        """
        Clear the row of another process's lock once its session is gone.

        The session of a dead holder ends within milliseconds, unless a child process inherited it:
        then it is killed here. A live holder unlocks at its next renewal what was forced.
        """
        action, given = "evict the holder of", (self._key(grant.name), grant.name, grant.owner)
        began = clock()
        while found := self._query(action, partial(execute, HOLDER, given), grant.name):
            ((session, user, *process),) = found
            if user is None or user != session:
                clear = partial(self._ledger.clear, leases=[grant])
                return self._query(action, clear, grant.name) == 1
            waited = clock() - began
            if waited > 2 * ENDS_WITHIN or not is_process_gone(Process(*process)):
                break
            if waited > ENDS_WITHIN:
                with contextlib.suppress(BackendUnavailable):
                    self._query(action, partial(execute, f"KILL {session}", ()), grant.name)
            time.sleep(0.005)
        return False

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        return self._query("look up locks", partial(self._holders, names)) if names else {}

    def _holders(self, names: Sequence[str], used: BaseDatabaseWrapper) -> dict[str, Held]:
        keys = {name: self._key(name) for name in names}
        users = _users(used, list(keys.values()))
        held = [name for name, key in keys.items() if users[key]]
        if not held:
            return {}
        rows = self._ledger.look_at(used, held)
        # Without a privilege, it lists the sessions of this user, which are those of the project.
        texts = [row[7] or "" for row in execute("SHOW FULL PROCESSLIST", (), used)]
        waiting = Counter(key for text in texts for key in WAITS_FOR.findall(text))
        return {
            name: describe(rows.get(name), users[keys[name]])._replace(waiting=waiting[keys[name]])
            for name in held
        }

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        if (vendor := connections[config.fence_database].vendor) != "mysql":
            what = f"{config.where('FENCE_DATABASE')} is {config.fence_database!r}"
            hint = "GET_LOCK needs MySQL or MariaDB. Name such a database, or use the backend "
            hint += "'django_fencedlock.backends.database.DatabaseBackend'."
            yield Problem("E010", f"{what}, a database of vendor {vendor!r}.", hint)

    def check(self) -> Iterator[Problem]:
        where = f"Database {self.config.fence_database!r}"
        try:
            facts = self._query("answer", _facts)
        except BackendUnavailable as exc:
            yield Problem("E013", str(exc), "Start the database, or correct its settings.")
            return
        if why := several_writers(facts):
            hint = "Use the backend DatabaseBackend, or a single primary."
            yield Problem("E058", f"{where} {why}, and each would grant the same lock.", hint)
        if (facts.get("log_bin"), facts.get("binlog_format")) == ("ON", "STATEMENT"):
            what = f"{where} has binlog_format=STATEMENT, which rejects what records a grant."
            yield Problem("E059", what, "Set binlog_format to ROW or MIXED.")
        if facts["proxy"]:
            what = f"{where} is reached through a proxy. If it changes sessions between statements,"
            hint = "Connect to the server itself, or switch off multiplexing for this user."
            yield Problem("W058", f"{what} each acquire fails.", hint)


def several_writers(facts: Mapping[str, str]) -> str | None:
    """Return why a server is one of several that grant the same lock; None if it isn't."""
    if facts.get("wsrep_on") == "ON" and int(facts.get("wsrep_cluster_size", 1)) > 1:
        return f"is a Galera cluster of {facts['wsrep_cluster_size']} nodes"
    is_in_group = facts.get("group_replication_group_name")
    if is_in_group and facts.get("group_replication_single_primary_mode") == "OFF":
        return "is in Group Replication with several primaries"
    return None


def _facts(used: BaseDatabaseWrapper) -> dict[str, str]:
    facts = dict(execute(FACTS, (), used)) | dict(execute(CLUSTER_SIZE, (), used))
    ((session, _),) = execute(CONNECTED, (), used)
    return {**facts, "proxy": "" if session == used.connection.thread_id() else "yes"}


def _limit_silence(session: Session, ttl: float) -> None:
    """Let the server end a session that is silent for `ttl`: its holder is paused or cut off."""
    seconds = min(max(1, math.ceil(ttl)), LONGEST)
    if seconds != session.silence:
        session.one("SET SESSION wait_timeout = %s", seconds)
        session.silence = seconds


def _users(used: BaseDatabaseWrapper, keys: Sequence[str]) -> dict[str, int | None]:
    """Return the session that holds each key."""
    users: dict[str, int | None] = {}
    for start in range(0, len(keys), 1000):
        part = keys[start : start + 1000]
        asked = ", ".join(["IS_USED_LOCK(%s)"] * len(part))
        users |= zip(part, execute(f"SELECT {asked}", part, used)[0], strict=True)
    return users
