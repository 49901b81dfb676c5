"""The row lease on each database: what it costs, and what happens when the server fails."""

import contextlib
import time
from datetime import timedelta
from functools import partial

import pytest
from django.db import connections, transaction
from django.utils import timezone

from django_fencedlock import LeaseLost, LockNotAcquired, lock
from django_fencedlock.backends.interface import Held, Renewal, Wait
from django_fencedlock.core import grants
from django_fencedlock.core.grants import new_claim
from django_fencedlock.core.identity import new_owner
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import BackendUnavailable, SettingsError
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.storage import connections as sessions
from django_fencedlock.test.processes import Processes
from tests.servers.process import wait_until
from tests.threads import at_once, sqlite_written_to

DATABASES = ["default", "postgres", "mariadb"]


@pytest.fixture
def on(settings, keep_connections):
    def use(database, **options):
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": database, "OPTIONS": options}}
        return service("default")

    return use


def execute(alias, *statements):
    with connections[alias].cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def ours(counter):
    return sum(
        count
        for statement, count in counter.items()
        if "django_fencedlock" in statement or statement.strip().upper() in ("BEGIN", "COMMIT")
    )


@pytest.mark.django_db(transaction=True, databases=["postgres"])
class TestOnPostgres:
    def test_a_refusal_is_two_statements_and_sees_the_dead(self, on, postgres, monkeypatch):
        backend = on("postgres").backend
        holder = new_owner()
        backend.acquire(new_claim("x", 30, owner=holder), Wait())
        looks = []
        monkeypatch.setattr(grants, "is_process_gone", looks.append)
        with postgres.statements() as seen:
            assert lock("x").acquire(blocking=False) is None
        assert sum(seen.values()) == ours(seen) == 2
        process = holder.process
        assert looks == [process]
        monkeypatch.setattr(grants, "is_process_gone", lambda process: True)
        assert lock("x").acquire(blocking=False).token == 2

    def test_a_repeated_refusal_is_one_statement(self, on, postgres):
        backend, wait = on("postgres").backend, Wait(10)
        backend.acquire(new_claim("x", 30), Wait())
        wait.held = backend.acquire(new_claim("x", 30), wait)
        with postgres.statements() as seen:
            assert isinstance(backend.acquire(new_claim("x", 30), wait), Held)
        assert sum(seen.values()) == ours(seen) == 1

    def test_acquire_and_release_are_one_statement_each(self, on, postgres):
        on("postgres")
        lock("warm").acquire().release()
        with postgres.statements() as seen:
            lock("x").acquire().release()
        assert sum(seen.values()) == ours(seen) == 2

    @pytest.mark.slow
    def test_a_thousand_leases_are_renewed_by_one_statement(self, on, postgres):
        backend = on("postgres").backend
        leases = [lock(f"n{place}").acquire() for place in range(1000)]
        with postgres.statements() as seen:
            assert backend.renew([lease.grant for lease in leases]) == [Renewal.KEPT] * 1000
        assert sum(seen.values()) == 1
        for lease in leases:
            lease.release()

    def test_a_row_that_a_contender_has_locked_does_not_stall_the_batch(self, on):
        backend = on("postgres").backend
        free, locked = lock("free").acquire(), lock("locked").acquire()
        with transaction.atomic(using="postgres"):
            rows = HeldLock.objects.using("postgres").filter(name="locked")
            list(rows.select_for_update(of=("self",)))
            assert backend.renew([free.grant, locked.grant]) == [Renewal.KEPT, Renewal.UNKNOWN]
        assert backend.renew([free.grant, locked.grant]) == [Renewal.KEPT, Renewal.KEPT]


@pytest.mark.django_db(transaction=True, databases=["mariadb"])
class TestOnMariaDB:
    def test_acquire_is_two_statements_and_release_one(self, on, mariadb):
        on("mariadb")
        lock("warm").acquire().release()
        with mariadb.statements() as seen:
            lock("x").acquire().release()
        assert sum(seen.values()) == 2 + 1

    def test_a_refusal_is_three_statements(self, on, mariadb):
        backend = on("mariadb").backend
        backend.acquire(new_claim("x", 30), Wait())
        with mariadb.statements() as seen:
            assert lock("x").acquire(blocking=False) is None
        assert sum(seen.values()) == 3

    def test_a_trigger_on_the_fences_changes_no_token(self, on):
        on("mariadb")
        fences = Fence._meta.db_table
        statements = ["CREATE TABLE audit (id BIGINT AUTO_INCREMENT PRIMARY KEY, token BIGINT)"]
        for event in ("insert", "update"):
            statements.append(
                f"CREATE TRIGGER audit_{event} AFTER {event} ON {fences} FOR EACH ROW "
                "INSERT INTO audit (token) VALUES (NEW.token + 50)"
            )
        try:
            execute("mariadb", *statements)
            for token in (1, 2):
                with lock("x") as lease:
                    assert lease.token == token
        finally:
            drops = [f"DROP TRIGGER IF EXISTS audit_{event}" for event in ("insert", "update")]
            execute("mariadb", *drops, "DROP TABLE IF EXISTS audit")

    @pytest.mark.slow
    def test_a_thousand_leases_are_renewed_by_a_few_statements(self, on, mariadb):
        backend = on("mariadb").backend
        leases = [lock(f"n{place}").acquire() for place in range(1000)]
        with mariadb.statements() as seen:
            assert backend.renew([lease.grant for lease in leases]) == [Renewal.KEPT] * 1000
        assert sum(seen.values()) == 8  # BEGIN, three chunks of SELECT and UPDATE, COMMIT
        for lease in leases:
            lease.release()

    def test_a_grant_that_fails_at_a_pinned_fence_leaves_no_row_behind(self, on):
        on("mariadb")
        lock("x").acquire().release()
        with transaction.atomic(using="mariadb"):
            Fence.objects.using("mariadb").select_for_update().get(name="x")
            assert lock("x").acquire(blocking=False) is None
            assert lock("x").holder() is None
        assert lock("x").acquire(blocking=False).release()

    def test_waiters_for_an_expired_lock_do_not_deadlock(self, on):
        held = on("mariadb")
        for _ in range(5):
            lease = lock("x").acquire()
            held.keeper.forget(lease)
            expired = timezone.now() - timedelta(hours=1)
            HeldLock.objects.using("mariadb").update(expires_at=expired)
            got = at_once([partial(lock("x").acquire, blocking=False)] * 6)
            assert len([each for each in got if each]) == 1
            with contextlib.suppress(LeaseLost):
                lease.release()
            HeldLock.objects.using("mariadb").all().delete()


@pytest.mark.django_db(transaction=True, databases=["default"])
class TestOnSQLite:
    def test_a_renewal_blocked_by_ones_own_transaction_is_no_loss(self, on):
        held = on("default")
        lease = lock("x", ttl=5).acquire()
        before = lease.deadline
        with transaction.atomic():
            Fence.objects.create(name="other", token=1, owner="o")
            wait_until(lambda: lease.deadline > before, "a renewal")
            assert not lease.lost
            lease.check()
        assert held.backend.renew([lease.grant]) == [Renewal.KEPT]
        assert lease.release()

    @pytest.mark.parametrize("timeout", [0, 0.3, 1.2])
    def test_a_waiter_for_a_file_that_stays_locked_gets_no_grant_in_time(self, on, timeout):
        on("default", TIMEOUT=0.5)
        with sqlite_written_to(), took() as seconds:
            assert lock("x", blocking_timeout=timeout).acquire() is None
        # Who doesn't wait for a holder does wait for the file, as for any answer.
        assert 0 <= seconds() - (timeout or 0.5) < 5
        assert lock("x").holder() is None

    def test_the_last_try_of_a_wait_that_is_over_waits_for_the_file_but_briefly(self, on):
        backend = on("default", TIMEOUT=20).backend
        over = Wait(60, held=Held())
        with sqlite_written_to(), took() as seconds:
            assert backend.acquire(new_claim("x", 30), over) == Held()
        assert seconds() < 10

    def test_a_file_that_is_unlocked_meanwhile_is_no_obstacle(self, on):
        on("default", TIMEOUT=0.3)
        # Timed from before the file is held: how long it takes to get here isn't known.
        with took() as seconds, sqlite_written_to(1):
            assert lock("x", blocking_timeout=20).acquire().release()
        assert seconds() > 0.9

    def test_an_acquire_or_release_waits_for_a_short_write(self, on):
        on("default")
        with sqlite_written_to(0.5):
            lease = lock("x", blocking_timeout=0).acquire()
        with sqlite_written_to(0.7):
            assert lease.release()

    def test_the_error_after_a_wait_names_the_file(self, on):
        on("default", TIMEOUT=0.3)
        with lock("x"):
            pass
        with (
            sqlite_written_to(),
            pytest.raises(LockNotAcquired) as caught,
            lock("x", blocking_timeout=0.1),
        ):
            pass
        assert "the next grant on 'default' has to wait for a transaction that writes" in str(
            caught.value
        )
        assert "held by" not in str(caught.value)

    def test_the_error_names_the_holder_if_it_has_the_file(self, on, process):
        on("default", TIMEOUT=60)
        holder = process.call(write_under, "x")
        waiting = lock("x", blocking_timeout=0.6)
        with took() as seconds, pytest.raises(LockNotAcquired) as caught, waiting:
            pass
        assert 0.5 < seconds() < 20
        assert f"held by {holder}" in str(caught.value)
        with took() as seconds:
            assert lock("x").acquire(blocking=False) is None
        assert seconds() < 20
        process.call(end_writing)
        assert lock("x", blocking_timeout=20).acquire().release()

    def test_the_error_names_the_last_holder_if_it_still_writes(self, on, process):
        on("default")
        holder = process.call(write_under, "x", abandoned=True)
        waiting = lock("x", blocking_timeout=0.6)
        with took() as seconds, pytest.raises(LockNotAcquired) as caught, waiting:
            pass
        assert 0.5 < seconds() < 20
        assert "has to wait for a transaction that writes to SQLite's file" in str(caught.value)
        assert f"its last holder was {holder}" in str(caught.value)
        process.call(end_writing)
        assert lock("x", blocking_timeout=20).acquire().release()

    @pytest.fixture
    def seen(self, on):
        backend = on("default").backend
        with lock("another"):
            pass
        [connection] = backend._sessions._idle
        seen = []
        connection.connection.set_trace_callback(lambda text: seen.append(text.split()[0]))
        return seen

    def test_acquire_is_a_transaction_of_two_statements_and_release_one(self, seen):
        with lock("x"):
            pass
        assert seen == ["BEGIN", "INSERT", "INSERT", "COMMIT", "DELETE"]

    def test_the_token_is_read_by_its_own_statement_before_sqlite_3_35(self, seen, monkeypatch):
        [connection] = service("default").backend._sessions._idle
        monkeypatch.setattr(connection.features, "can_return_columns_from_insert", False)
        with lock("x") as lease, lock("y"):
            pass
        with lock("x") as again:
            assert again.token == lease.token + 1
        acquire = ["BEGIN", "INSERT", "INSERT", "SELECT", "COMMIT"]
        assert seen == [*acquire, *acquire, "DELETE", "DELETE", *acquire, "DELETE"]

    def test_a_refusal_of_a_try_that_does_not_wait_only_reads(self, seen):
        service("default").backend.acquire(new_claim("x", 30), Wait())
        seen.clear()
        assert lock("x").acquire(blocking=False) is None
        assert set(seen) == {"SELECT"}

    def test_a_full_disk_is_a_clear_error_and_no_grant(self, on, monkeypatch):
        options = connections["default"].settings_dict["OPTIONS"]
        on("default")
        sessions.close_all()
        with connections["default"].cursor() as cursor:
            cursor.execute("VACUUM")  # leaves no free pages in the file
        monkeypatch.setitem(options, "init_command", "PRAGMA max_page_count = 1")
        with pytest.raises(BackendUnavailable, match="database or disk is full"):
            for place in range(500):
                lock(f"{place}-{'x' * 180}").acquire()
        monkeypatch.undo()
        sessions.close_all()


@pytest.fixture
def process():
    with contextlib.closing(Processes()) as processes, processes.borrow() as process:
        yield process


_writing = contextlib.ExitStack()


def write_under(name, abandoned=False):
    """In another process: write in a transaction under the lock, until `end_writing()`."""
    lease = _writing.enter_context(lock(name))
    if abandoned:
        service("default").keeper.forget(lease)
        HeldLock.objects.update(expires_at=timezone.now() - timedelta(hours=1))
    _writing.enter_context(lease.atomic())
    return str(lease.holder)


def end_writing():
    with contextlib.suppress(LeaseLost):
        _writing.close()


@contextlib.contextmanager
def took():
    began, ended = time.monotonic(), []
    yield lambda: ended[0] - began
    ended.append(time.monotonic())


class TestWhenTheServerFails:
    """On a Postgres of the test's own. The bound is two time-outs: see DatabaseBackend."""

    @pytest.fixture
    def server(self, make_postgres):
        return make_postgres()

    @pytest.fixture
    def alias(self, server, make_alias, on):
        alias = make_alias(server.django())
        on(alias, TIMEOUT=1)
        return alias

    def refused(self):
        started = time.monotonic()
        with pytest.raises(BackendUnavailable) as caught:
            lock("x").acquire()
        assert time.monotonic() - started < 20
        return str(caught.value)

    def test_a_server_that_is_gone_is_a_clear_error(self, server, alias):
        server.kill()
        assert "'default' (database) could not acquire lock 'x'" in self.refused()

    def test_a_read_only_server_grants_nothing(self, server, alias):
        server.execute(f"ALTER DATABASE {server.database} SET default_transaction_read_only = on")
        server.terminate_sessions()
        assert "read-only" in self.refused()

    def test_missing_tables_name_the_command_that_makes_them(self, server, alias):
        server.execute("DROP TABLE django_fencedlock_heldlock")
        with pytest.raises(SettingsError, match=f"migrate django_fencedlock --database {alias}"):
            lock("x").acquire()
