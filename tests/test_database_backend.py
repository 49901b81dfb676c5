"""The row lease on each database: what it costs, and what happens when the server fails."""

import contextlib
import threading
import time

import pytest
from django.db import connections, transaction

from django_fencedlock import LeaseLost, lock, sessions
from django_fencedlock.backends.base import Renewal
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.services import service

DATABASES = ["default", "postgres", "mariadb"]


@pytest.fixture
def keep_connections(monkeypatch):
    """Keep idle private connections, as outside of a test runner."""
    monkeypatch.setattr(sessions, "under_test", lambda: False)
    yield
    sessions.close_all()


@pytest.fixture
def on(settings, keep_connections):
    def use(database, **options):
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": database, "OPTIONS": options}}
        return service("default")

    return use


def ours(counter):
    """The statements that touch the package's tables or begin and end its transactions."""
    return sum(
        count
        for statement, count in counter.items()
        if "django_fencedlock" in statement or statement.strip().upper() in ("BEGIN", "COMMIT")
    )


@pytest.mark.django_db(transaction=True, databases=["postgres"])
class TestOnPostgres:
    def test_acquire_and_release_are_one_statement_each(self, on, postgres):
        on("postgres")
        lock("warm").acquire().release()
        with postgres.statements() as seen:
            lease = lock("x").acquire()
        assert sum(seen.values()) == ours(seen) == 1
        with postgres.statements() as seen:
            lease.release()
        assert sum(seen.values()) == ours(seen) == 1

    def test_a_thousand_leases_are_renewed_by_one_statement(self, on, postgres):
        backend = on("postgres").backend
        leases = [lock(f"n{place}").acquire() for place in range(1000)]
        with postgres.statements() as seen:
            assert backend.renew(leases) == [Renewal.KEPT] * 1000
        assert sum(seen.values()) == 1
        for lease in leases:
            lease.release()

    def test_a_row_that_a_contender_has_locked_does_not_stall_the_batch(self, on):
        backend = on("postgres").backend
        free, locked = lock("free").acquire(), lock("locked").acquire()
        with transaction.atomic(using="postgres"):
            list(
                HeldLock.objects.using("postgres")
                .select_for_update(of=("self",))
                .filter(name="locked")
            )
            assert backend.renew([free, locked]) == [Renewal.KEPT, Renewal.UNKNOWN]
        assert backend.renew([free, locked]) == [Renewal.KEPT, Renewal.KEPT]

    def test_a_terminated_session_is_replaced_unnoticed(self, on, postgres):
        on("postgres")
        with lock("x"):
            postgres.terminate_sessions()
            connections["postgres"].close()
        assert lock("x").acquire().token == 2


@pytest.mark.django_db(transaction=True, databases=["mariadb"])
class TestOnMariaDB:
    def test_acquire_is_two_statements_and_release_one(self, on, mariadb):
        on("mariadb")
        lock("warm").acquire().release()
        with mariadb.statements() as seen:
            lease = lock("x").acquire()
        assert sum(seen.values()) == 2
        with mariadb.statements() as seen:
            lease.release()
        assert sum(seen.values()) == 1

    def test_a_thousand_leases_are_renewed_by_a_few_statements(self, on, mariadb):
        backend = on("mariadb").backend
        leases = [lock(f"n{place}").acquire() for place in range(1000)]
        with mariadb.statements() as seen:
            assert backend.renew(leases) == [Renewal.KEPT] * 1000
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

    def test_contenders_for_an_expired_lock_do_not_deadlock(self, on):
        held = on("mariadb")
        for _ in range(5):
            lease = lock("x", ttl=0.05).acquire()
            held.keeper.forget(lease)
            time.sleep(0.06)
            got = take_at_once("x", threads=6)
            assert len(got) == 1
            with contextlib.suppress(LeaseLost):
                lease.release()
            HeldLock.objects.using("mariadb").all().delete()


def take_at_once(name, threads):
    start, got = threading.Barrier(threads), []

    def take():
        start.wait()
        if lease := lock(name).acquire(blocking=False):
            got.append(lease.token)
        connections.close_all()

    workers = [threading.Thread(target=take) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return got


@pytest.mark.django_db(transaction=True, databases=["default"])
class TestOnSQLite:
    def test_a_renewal_blocked_by_ones_own_transaction_is_no_loss(self, on):
        held = on("default")
        lease = lock("x", ttl=0.6).acquire()
        with transaction.atomic():
            Fence.objects.create(name="other", token=1, owner="o")
            time.sleep(1.5)
            assert not lease.lost
            lease.check()
        assert held.backend.renew([lease]) == [Renewal.KEPT]
        assert lease.release()

    def test_a_file_that_stays_locked_is_an_error_and_no_grant(self, on):
        on("default", TIMEOUT=0.3)
        connections["default"].ensure_connection()
        with held_file(), pytest.raises(BackendUnavailable, match="is locked"):
            lock("x").acquire()
        assert lock("x").holder() is None

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


@contextlib.contextmanager
def held_file():
    """Have another connection hold SQLite's write lock."""
    holds, done = threading.Event(), threading.Event()

    def hold():
        with transaction.atomic():
            Fence.objects.create(name="other", token=1, owner="o")
            holds.set()
            done.wait(10)
        connections.close_all()

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait(10)
    try:
        yield
    finally:
        done.set()
        thread.join()


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
        assert time.monotonic() - started < 6
        return str(caught.value)

    def test_a_server_that_is_gone_is_a_clear_error(self, server, alias):
        server.kill()
        assert "'default' (database) failed at the acquiring of lock 'x'" in self.refused()

    def test_a_server_that_hangs_is_cut_off_within_the_bound(self, server, alias):
        lock("warm").acquire().release()
        server.pause()
        try:
            self.refused()
        finally:
            server.resume()
        assert lock("warm").acquire(blocking=False) is not None

    def test_a_lease_outlives_a_restart(self, server, alias):
        lease = lock("x").acquire()
        server.kill()
        server.start()
        assert lease.verify()
        assert lease.release()
        assert lock("x").acquire().token == 2

    def test_a_read_only_server_grants_nothing(self, server, alias):
        server.execute(f"ALTER DATABASE {server.database} SET default_transaction_read_only = on")
        server.terminate_sessions()
        assert "read-only" in self.refused()

    def test_missing_tables_name_the_command_that_makes_them(self, server, alias):
        server.execute("DROP TABLE django_fencedlock_heldlock")
        assert f"manage.py migrate django_fencedlock --database {alias}" in self.refused()
