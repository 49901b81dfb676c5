"""
What a former holder's write comes to when the newer grant is recorded around it.

Each schedule is run on real sessions of a server, step by step, at each isolation level; and once
more without the locking clause, to show that it is the clause that stops stale writes.
"""

import contextlib
import contextvars
import dataclasses
import threading
import time

import pytest
from django.db import Error, connections, transaction

from django_fencedlock import StaleFence, lock
from django_fencedlock.core.identity import new_owner
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.storage import fences
from django_fencedlock.storage.connections import private
from django_fencedlock.storage.dialect import Entry
from django_fencedlock.storage.vendors import LEDGERS

from .models import Account, LedgerLine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True, databases=["postgres", "mariadb"]),
]

COMMITTED, REPEATABLE, SERIALIZABLE = "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"
LEVELS = [("postgres", level) for level in (COMMITTED, REPEATABLE, SERIALIZABLE)]
LEVELS += [("mariadb", level) for level in (COMMITTED, REPEATABLE)]
SET_LEVEL = {
    "postgres": "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {}",
    "mariadb": "SET SESSION TRANSACTION ISOLATION LEVEL {}",
}
SESSION = {"postgres": "SELECT pg_backend_pid()", "mariadb": "SELECT CONNECTION_ID()"}
WAITS = {
    "postgres": "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'",
    "mariadb": (
        "SELECT 1 FROM information_schema.innodb_trx "
        "WHERE trx_mysql_thread_id = %s AND trx_state = 'LOCK WAIT'"
    ),
}
LONG = 20

# What can come of a schedule.
REFUSED = "refused as stale"
CONFLICT = "an error of the database"
WAITED = "written before the newer grant, which waited"
STALE = "written after the newer grant"


@dataclasses.dataclass
class Stage:
    database: str
    level: str
    account: Account
    line: LedgerLine
    lease: object
    granter: object
    watcher: object
    extra: str = ""
    writer: object = None

    @property
    def name(self):
        return f"account:{self.account.pk}"

    @property
    def new_key(self):
        return -2 * self.line.pk

    def grant(self):
        entry = Entry(self.name, "default", "database", new_owner(), ttl=30)
        try:
            taken, token = LEDGERS[self.granter.vendor].claim(self.granter, entry)
        except Error as exc:
            if LEDGERS[self.granter.vendor].is_row_locked(exc):
                return False
            raise
        assert taken
        assert token > self.lease.token
        return True

    @contextlib.contextmanager
    def rows_locked(self):
        with contextlib.closing(private(self.database, 10)) as third, third.cursor() as cursor:
            cursor.execute("BEGIN")
            for table, pk in (("account", self.account.pk), ("ledgerline", self.line.pk)):
                cursor.execute(f"SELECT 1 FROM tests_{table} WHERE id = %s FOR UPDATE", [pk])
            # Whoever inserts the same key waits for this one's end.
            cursor.execute(
                "INSERT INTO tests_ledgerline (id, account_id, amount, fence) "
                "VALUES (%s, %s, 0, 0)",
                [self.new_key, self.account.pk],
            )
            yield
            cursor.execute("ROLLBACK")

    def written(self):
        lines = LedgerLine.objects.using(self.database).filter(account=self.account, amount=99)
        accounts = Account.objects.using(self.database).filter(pk=self.account.pk, balance=99)
        return lines.exists() or accounts.exists()


def save(stage):
    stage.line.amount = 99
    stage.line.save()


def update(stage):
    LedgerLine.objects.using(stage.database).filter(account=stage.account).update(amount=99)


def insert(stage):
    line = LedgerLine(pk=stage.new_key, account=stage.account, amount=99)
    line.save(using=stage.database, force_insert=True)


def bulk_create(stage):
    keys = (stage.new_key, stage.new_key - 1)
    lines = [LedgerLine(pk=key, account=stage.account, amount=99) for key in keys]
    LedgerLine.objects.using(stage.database).bulk_create(lines)


def plain_in_lease_atomic(stage):
    stage.account.balance = 99
    stage.account.save()


PATHS = [save, update, insert, bulk_create, plain_in_lease_atomic]


class Writer(threading.Thread):
    def __init__(self, stage, write, snapshot=False):
        super().__init__(daemon=True)
        self.stage, self.write, self.snapshot = stage, write, snapshot
        stage.writer = self
        self.outcome = self.error = self.session = None
        self._reached = {step: threading.Event() for step in ("ready", "written", "ended")}
        self._go = {step: threading.Event() for step in ("ready", "written")}
        self._context = contextvars.copy_context()
        self.start()
        self.wait_for("ready")

    def run(self):
        self._context.run(self._run)

    def _run(self):
        connection = connections[self.stage.database]
        try:
            with connection.cursor() as cursor:
                cursor.execute(SET_LEVEL[self.stage.database].format(self.stage.level))
                if self.stage.extra:
                    cursor.execute(self.stage.extra)
                cursor.execute(SESSION[self.stage.database])
                (self.session,) = cursor.fetchone()
            self._transaction()
            self.outcome = "committed"
        except StaleFence:
            self.outcome = REFUSED
        except Error as exc:
            self.outcome, self.error = CONFLICT, exc
        finally:
            connection.close()
            for event in self._reached.values():
                event.set()

    def _transaction(self):
        if self.write is plain_in_lease_atomic:
            self._pause("ready")
            with self.stage.lease.atomic():
                self._write()
            return
        with transaction.atomic(using=self.stage.database):
            if self.snapshot:
                list(Fence.objects.using(self.stage.database).all())
            self._pause("ready")
            self._write()

    def _write(self):
        self.write(self.stage)
        self._pause("written")

    def _pause(self, step):
        self._reached[step].set()
        assert self._go[step].wait(LONG)

    def wait_for(self, step):
        assert self._reached[step].wait(LONG)

    def go(self, step):
        self._go[step].set()

    def waits_or_has(self, step):
        """Go on as soon as the writer's statement waits in the server, or a step is reached."""
        until = time.monotonic() + LONG
        with self.stage.watcher.cursor() as cursor:
            # InnoDB brings its tables of waits up to date only if nobody read them for 0.1 s.
            while not self._reached[step].wait(0.15):
                cursor.execute(WAITS[self.stage.database], [self.session])
                if cursor.fetchone():
                    return True
                assert time.monotonic() < until
        return False

    def finish(self):
        self.go("ready")
        self.go("written")
        self.join(LONG)
        assert not self.is_alive()


# The schedules. Each returns the writer, and whether the newer grant was there before its commit.


def granted_before_the_write(stage, write):
    writer = Writer(stage, write)
    granted = stage.grant()
    writer.finish()
    return writer, granted


def grant_uncommitted_during_the_write(stage, write):
    writer = Writer(stage, write)
    with stage.granter.cursor() as cursor:
        cursor.execute("BEGIN")
        granted = stage.grant()
        writer.go("ready")
        writer.waits_or_has("written")
        cursor.execute("COMMIT")
    writer.finish()
    return writer, granted


def granted_between_the_write_and_its_commit(stage, write):
    writer = Writer(stage, write)
    writer.go("ready")
    writer.wait_for("written")
    granted = stage.grant()
    writer.finish()
    return writer, granted


def granted_after_the_writers_snapshot(stage, write):
    writer = Writer(stage, write, snapshot=True)
    granted = stage.grant()
    writer.finish()
    return writer, granted


def granted_while_the_write_waits_for_a_row(stage, write):
    writer = Writer(stage, write)
    with stage.rows_locked():
        writer.go("ready")
        assert writer.waits_or_has("written")
        granted = stage.grant()
    writer.finish()
    return writer, granted


SCHEDULES = [
    *(granted_before_the_write, grant_uncommitted_during_the_write),
    *(granted_between_the_write_and_its_commit, granted_after_the_writers_snapshot),
    granted_while_the_write_waits_for_a_row,
]


def outcomes(database, level, schedule, extra=""):
    found = {}
    for write in PATHS:
        if write is plain_in_lease_atomic and schedule is granted_after_the_writers_snapshot:
            continue  # Its first query is the one that locks the fence.
        with staged(database, level, extra) as stage:
            writer, granted = schedule(stage, write)
            found[write] = writer.outcome
            if writer.outcome == "committed":
                found[write] = STALE if granted else WAITED
            if writer.error is not None:
                cause = writer.error.__cause__
                assert getattr(cause, "sqlstate", None) == "40001" or cause.args[0] == 1020
            assert stage.written() == (writer.outcome == "committed")
            if not granted:
                # It had to wait for the writer, and for nothing else.
                assert stage.grant()
    return found


@contextlib.contextmanager
def staged(database, level, extra=""):
    account = Account.objects.using(database).create()
    lease = lock(f"account:{account.pk}").acquire()
    line = LedgerLine.objects.using(database).create(account=account)
    # As if its time were over, and nobody had renewed it.
    HeldLock.objects.using(database).filter(name=lease.name).delete()
    with contextlib.ExitStack() as stack:
        stack.callback(lease.release)
        granter = stack.enter_context(contextlib.closing(private(database, 10)))
        watcher = stack.enter_context(contextlib.closing(private(database, 10)))
        if database == "mariadb":
            with granter.cursor() as cursor:
                cursor.execute("SET SESSION innodb_lock_wait_timeout = 0")
        stage = Stage(database, level, account, line, lease, granter, watcher, extra)
        try:
            yield stage
        finally:
            if stage.writer is not None:
                stage.writer.finish()


@pytest.fixture
def fences_in(settings):
    def use(database):
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": database}}

    return use


def expected(database, level, schedule):
    if schedule in (
        granted_between_the_write_and_its_commit,
        granted_while_the_write_waits_for_a_row,
    ):
        return WAITED
    if schedule is granted_before_the_write or database == "mariadb" or level == COMMITTED:
        return REFUSED
    # The fence changed after the snapshot: Postgres doesn't tell how, so neither do we.
    return CONFLICT


def expected_without_the_clause(database, level, schedule):
    """The ways of writing by which something stale is then written after the newer grant."""
    if schedule is granted_before_the_write:
        return set()
    if schedule is granted_after_the_writers_snapshot:
        return set(PATHS[:4]) if database == "postgres" and level != COMMITTED else set()
    if database == "postgres":
        return set(PATHS)
    # MariaDB locks what a statement that writes reads, all but an UPDATE at READ COMMITTED.
    if level == COMMITTED:
        return {save, update, plain_in_lease_atomic}
    return {plain_in_lease_atomic}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
@pytest.mark.parametrize(("database", "level"), LEVELS)
def test_nothing_stale_is_written_after_the_newer_grant(fences_in, database, level, schedule):
    fences_in(database)
    found = outcomes(database, level, schedule)
    assert set(found.values()) == {expected(database, level, schedule)}
    assert found.keys() >= set(PATHS[:4])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
@pytest.mark.parametrize(("database", "level"), LEVELS)
def test_without_the_clause_writes_are_stale(fences_in, monkeypatch, database, level, schedule):
    """The same schedules, to show that they can fail, and that the clause is what they test."""
    fences_in(database)
    monkeypatch.setitem(fences.SHARE, connections[database].vendor, "")
    found = outcomes(database, level, schedule)
    written = {write for write, outcome in found.items() if outcome == STALE}
    assert written == expected_without_the_clause(database, level, schedule)


def test_an_error_for_an_old_snapshot_on_mariadb_is_not_called_stale(fences_in):
    """With innodb_snapshot_isolation, the default from 11.6 on, MariaDB fails as Postgres does."""
    fences_in("mariadb")
    snapshot = "SET SESSION innodb_snapshot_isolation = ON"
    found = outcomes("mariadb", REPEATABLE, granted_after_the_writers_snapshot, extra=snapshot)
    assert set(found.values()) == {CONFLICT}
