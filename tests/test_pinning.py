"""`lease.atomic()`, how long it keeps a takeover waiting, and what the one who waits is told."""

import contextlib
import contextvars
import re
import threading
import time
from datetime import timedelta

import pymysql
import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import Group, Permission
from django.db import Error, IntegrityError, OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_fencedlock import LeaseLost, LockNotAcquired, lock
from django_fencedlock.core.identity import new_owner
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import (
    InsideTransaction,
    LockRequired,
    OutcomeUnknown,
    StaleFence,
    Unfenced,
    WrongDatabase,
)
from django_fencedlock.models import Fence, Fencing, HeldLock
from django_fencedlock.storage.connections import private
from django_fencedlock.storage.fenced_atomic import grant_of, is_pinned
from django_fencedlock.storage.vendors import Entry, ledger_for

from .models import Account, Invoice, LedgerLine
from .servers import shared
from .servers.process import free_port

DATABASES = ["default", "postgres", "mariadb"]
LONG = 20

pytestmark = pytest.mark.django_db(transaction=True, databases=DATABASES)


@pytest.fixture
def on(settings):
    def use(database, backend="database.DatabaseBackend"):
        path = f"django_fencedlock.backends.{backend}"
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": database, "BACKEND": path}}
        return database

    return use


@pytest.fixture(params=DATABASES)
def database(request, on):
    return on(request.param)


@pytest.fixture
def on_postgres(on):
    on("postgres")


@pytest.fixture
def on_redis(settings, redis_server):
    redis_server.empty()

    def use(database):
        settings.FENCEDLOCK = {
            "default": {
                "BACKEND": "django_fencedlock.backends.redis.RedisBackend",
                "LOCATION": redis_server.url,
                "FENCE_DATABASE": database,
            }
        }

    return use


def lose_by_redis(lease):
    """Have Redis forget all, as after a failover, and nobody notice it yet."""
    service("default").keeper.forget(lease)
    shared.redis().empty()


def keys_of_redis():
    with shared.redis().client() as client:
        return client.keys("*")


def abandon(lease):
    """Have nobody renew the lease, as if its process hung, and its time be over."""
    service("default").keeper.forget(lease)
    held = HeldLock.objects.using(lease.database).filter(name=lease.name)
    held.update(expires_at=timezone.now() - timedelta(hours=1))


def overtake(lease):
    """Record a newer grant."""
    abandon(lease)
    entry = Entry(lease.name, "default", "database", new_owner(), ttl=30)
    with contextlib.closing(private(lease.database, 5)) as session:
        assert ledger_for(session).claim(session, entry)[0]


class Elsewhere(threading.Thread):
    """Runs something in a thread of its own, with connections of its own."""

    def __init__(self, work):
        super().__init__(daemon=True)
        self._work = work
        self.result = self.error = None
        self.start()

    def run(self):
        try:
            self.result = self._work()
        except Exception as exc:
            self.error = exc
        finally:
            connections.close_all()

    def outcome(self):
        self.join(LONG)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def take(name, timeout=0.0):
    """Take a lock as somebody else does: the lease's token, or the error."""

    def enter():
        with lock(name, blocking_timeout=timeout) as lease:
            return lease.token

    return Elsewhere(enter)


@contextlib.contextmanager
def autocommit_off(database):
    connection = connections[database]
    connection.set_autocommit(False)
    try:
        yield
    finally:
        connection.rollback()
        connection.set_autocommit(True)


def execute(database, sql, *given):
    with connections[database].cursor() as cursor:
        cursor.execute(sql, given or None)
        return cursor.fetchone() if cursor.description else None


class TestWhatIsInside:
    def test_everything_is_committed_together(self, database):
        account = Account.objects.using(database).create()
        group = Group.objects.using(database).create(name="g")
        permission = Permission.objects.using(database).first()
        with lock("x") as lease, lease.atomic():
            account.balance = 1
            account.save()
            execute(database, "UPDATE tests_account SET name = 'raw' WHERE id = %s", account.pk)
            group.permissions.add(permission)
        account.refresh_from_db()
        assert (account.balance, account.name) == (1, "raw")
        assert group.permissions.count() == 1
        with lock("x") as lease, lease.atomic():
            group.delete()
        assert not Group.objects.using(database).exists()

    def test_a_former_holder_gets_nothing_done(self, database):
        lease = lock("x").acquire()
        overtake(lease)
        with (
            pytest.raises(StaleFence, match=r"newest token is 2, granted to .*pid") as caught,
            lease.atomic(),
        ):
            pytest.fail("the block was entered")
        assert caught.value.token == 1
        assert caught.value.holder.token == 2
        assert not connections[database].in_atomic_block
        lease.release()

    def test_a_name_whose_fence_is_gone_is_stale(self, database):
        with lock("x") as lease:
            Fence.objects.using(database).all().delete()
            with pytest.raises(StaleFence, match="its fence is gone"), lease.atomic():
                pytest.fail("the block was entered")

    def test_an_error_rolls_all_of_it_back(self, database):
        with lock("x") as lease, pytest.raises(ZeroDivisionError), lease.atomic():
            Account.objects.using(database).create()
            raise ZeroDivisionError
        assert not Account.objects.using(database).exists()

    def test_the_fence_is_looked_at_once(self, database):
        invoice = Invoice.objects.using(database).create()
        connection = connections[database]
        with invoice.fencing.lock() as lease:
            with (
                CaptureQueriesContext(
                    connection,
                ) as seen,
                lease.atomic(),
            ):
                invoice.save()
                invoice.save()
                Invoice.objects.using(database).filter(pk=invoice.pk).update(note="n")
            statements = [query["sql"] for query in seen]
            about_fences = [sql for sql in statements if "django_fencedlock_fence" in sql]
            assert len(about_fences) == 1
            assert re.match("SELECT .+ FROM django_fencedlock_fence WHERE name", about_fences[0])
            assert len([sql for sql in statements if sql.startswith("UPDATE")]) == 3
            # Outside of it each looks for itself again.
            with CaptureQueriesContext(connection) as seen:
                invoice.save()
            assert "django_fencedlock_fence" in seen.captured_queries[-1]["sql"]

    def test_a_fenced_row_wants_its_own_lease_all_the_same(self, database):
        invoice = Invoice.objects.using(database).create()
        with (
            lock("x") as lease,
            pytest.raises(LockRequired, match=rf"invoice:{invoice.pk}.*'x'"),
            lease.atomic(),
        ):
            invoice.save()

    def test_a_save_under_another_lease_is_checked(self, database):
        invoice = Invoice.objects.using(database).create()
        own = invoice.fencing.lock().acquire()
        with lock("x") as lease:
            with CaptureQueriesContext(connections[database]) as seen, lease.atomic():
                invoice.save()
            (saved,) = (query["sql"] for query in seen if query["sql"].startswith("UPDATE"))
            assert "django_fencedlock_fence" in saved
            overtake(own)
            with pytest.raises(StaleFence), lease.atomic():
                Account.objects.using(database).create()
                invoice.save()
            assert not Account.objects.using(database).exists()
            own.release()

    def test_a_context_that_outlives_the_block_has_nothing_pinned(self, database):
        """As a task has, that was started within the block."""
        with lock("x") as lease:
            with lease.atomic():
                assert is_pinned(connections[database], grant_of(lease))
                context = contextvars.copy_context()
            assert not context.run(is_pinned, connections[database], grant_of(lease))
            with transaction.atomic(using=database):
                assert not context.run(is_pinned, connections[database], grant_of(lease))

    def test_another_thread_has_nothing_pinned(self, on_postgres):
        with lock("x") as lease, lease.atomic():
            context = contextvars.copy_context()
            grant = grant_of(lease)
            there = Elsewhere(lambda: context.run(is_pinned, connections["postgres"], grant))
            assert not there.outcome()

    def test_a_connection_closed_inside_has_nothing_pinned(self, on_postgres):
        with lock("x") as lease, contextlib.suppress(Error), lease.atomic():
            connections["postgres"].close()
            connections["postgres"].connect()
            assert not is_pinned(connections["postgres"], grant_of(lease))

    def test_it_works_from_a_coroutine(self, database):
        def work(lease):
            with lease.atomic():
                return Account.objects.using(database).create().pk

        async def main():
            async with lock("x") as lease:
                return await sync_to_async(work)(lease)

        made = async_to_sync(main)()
        assert Account.objects.using(database).get().pk == made


class TestWhereItIsAllowed:
    def test_not_inside_a_transaction(self, database):
        with (
            lock("x") as lease,
            transaction.atomic(using=database),
            pytest.raises(InsideTransaction, match="Open it first"),
            lease.atomic(),
        ):
            pytest.fail("the block was entered")

    def test_not_inside_a_transaction_that_is_open_without_atomic(self, database):
        with (
            lock("x") as lease,
            autocommit_off(database),
            pytest.raises(InsideTransaction, match="Open it first"),
            lease.atomic(),
        ):
            pytest.fail("the block was entered")

    def test_not_inside_a_savepoint_of_another_one(self, database):
        with (
            lock("x") as x,
            lock("y") as y,
            x.atomic(),
            transaction.atomic(using=database),
            pytest.raises(InsideTransaction),
            y.atomic(),
        ):
            pytest.fail("the block was entered")

    def test_not_inside_a_transaction_that_pins_by_single_saves_alone(self, database):
        invoice = Invoice.objects.using(database).create()
        with invoice.fencing.lock() as lease, transaction.atomic(using=database):
            invoice.save()
            with pytest.raises(InsideTransaction), lease.atomic():
                pytest.fail("the block was entered")

    def test_directly_inside_another_one(self, database):
        with lock("x") as x, lock("y") as y, x.atomic():
            with y.atomic(), x.atomic():
                Account.objects.using(database).create()
                assert is_pinned(connections[database], grant_of(x))
                assert is_pinned(connections[database], grant_of(y))
            # Still locked, for the inner block was no transaction of its own.
            if database != "default":
                assert pinned_by(y) is not None
        assert Account.objects.using(database).count() == 1

    def test_what_fails_inside_another_one_fails_both(self, database):
        with lock("x") as x, lock("y") as y:
            with x.atomic(), pytest.raises(ZeroDivisionError), y.atomic():
                Account.objects.using(database).create()
                raise ZeroDivisionError
            assert not Account.objects.using(database).exists()

    def test_a_stale_lease_inside_another_one_spoils_both(self, database):
        with lock("x") as x:
            y = lock("y").acquire()
            overtake(y)
            with x.atomic():
                Account.objects.using(database).create()
                with pytest.raises(StaleFence), y.atomic():
                    pytest.fail("the block was entered")
            assert not Account.objects.using(database).exists()
            y.release()

    def test_not_on_another_database(self, on_postgres):
        with (
            lock("x") as lease,
            pytest.raises(WrongDatabase, match="'postgres', and only"),
            lease.atomic(using="default"),
        ):
            pytest.fail("the block was entered")

    def test_an_unfenced_lease_has_no_fence_to_lock(self, database):
        with lock("x", fenced=False) as lease, pytest.raises(Unfenced), lease.atomic():
            pytest.fail("the block was entered")

    def test_not_under_a_lease_that_was_given_back(self, database):
        with lock("x") as lease:
            pass
        with pytest.raises(LeaseLost, match="it was released"), lease.atomic():
            pytest.fail("the block was entered")

    def test_not_under_a_lease_that_was_lost(self, database):
        lease = lock("x").acquire()
        service("default").lose(lease, "as a test")
        with pytest.raises(LeaseLost, match="as a test"), lease.atomic():
            pytest.fail("the block was entered")
        lease.release()

    def test_under_a_lease_that_ran_out_while_nobody_came(self, database):
        """A pause costs nothing unless somebody else took the lock."""
        with lock("x", ttl=0.5) as lease:
            service("default").keeper.forget(lease)
            while not lease.expired:
                time.sleep(0.01)
            with lease.atomic():
                Account.objects.using(database).create()
        assert Account.objects.using(database).exists()


@pytest.mark.django_db(databases=DATABASES)
class TestInsideATestCase:
    def test_it_works_and_nests(self, database):
        with lock("x") as x, lock("y") as y:
            with x.atomic(), y.atomic():
                Account.objects.using(database).create()
            with pytest.raises(ZeroDivisionError), x.atomic():
                Account.objects.using(database).create()
                raise ZeroDivisionError
            assert Account.objects.using(database).count() == 1

    def test_not_inside_a_transaction_of_the_code_under_test(self, database):
        with (
            lock("x") as lease,
            transaction.atomic(using=database),
            pytest.raises(InsideTransaction),
            lease.atomic(),
        ):
            pytest.fail("the block was entered")


class TestARollbackByTheDatabase:
    """Code that goes on after it would go on in a transaction that has nothing locked."""

    def test_mariadb_rolls_back_at_a_deadlock(self, on):
        on("mariadb")
        one, two = (Account.objects.using("mariadb").create() for _ in range(2))
        add = "UPDATE tests_account SET balance = balance + %s WHERE id = %s"
        locked, wanted = threading.Event(), threading.Event()

        def other():
            with transaction.atomic(using="mariadb"):
                # InnoDB ends the one that has written less.
                Account.objects.using("mariadb").bulk_create(Account() for _ in range(50))
                execute("mariadb", add, 10, two.pk)
                locked.set()
                wanted.wait(LONG)
                execute("mariadb", add, 10, one.pk)

        thread = Elsewhere(other)
        assert locked.wait(LONG)
        with lock("x") as lease, lease.atomic():
            execute("mariadb", add, 1, one.pk)
            wanted.set()
            with pytest.raises(OperationalError, match="1213"):
                execute("mariadb", add, 1, two.pk)
            with pytest.raises(TransactionManagementError):
                execute("mariadb", add, 1, one.pk)
        thread.outcome()
        assert all(
            Account.objects.using("mariadb").get(pk=account.pk).balance == 10
            for account in (one, two)
        )

    def test_sqlite_does_on_request(self, on):
        on("default")
        account = Account.objects.create()
        add = "INSERT OR ROLLBACK INTO tests_account (id, name, balance) VALUES (%s, '', 1)"
        with lock("x") as lease, lease.atomic():
            with pytest.raises(IntegrityError):
                execute("default", add, account.pk)
            with pytest.raises(TransactionManagementError):
                execute("default", add, account.pk + 1)
        assert Account.objects.count() == 1

    def test_an_error_of_one_statement_leaves_the_rest(self, on):
        on("mariadb")
        with lock("x") as lease, lease.atomic():
            Account.objects.using("mariadb").create()
            with pytest.raises(Error):
                execute("mariadb", "SELECT nothing FROM nowhere")
        assert Account.objects.using("mariadb").exists()


class TestOnSQLite:
    @pytest.fixture(params=[None, "DEFERRED", "EXCLUSIVE"])
    def mode(self, request, on):
        on("default")
        connection = connections["default"]
        connection.ensure_connection()
        before = connection.transaction_mode
        connection.transaction_mode = request.param
        yield request.param
        connection.transaction_mode = before

    def test_the_file_is_taken_at_the_beginning(self, mode):
        """Else somebody's write, even our own renewal, would make the first write fail."""
        account = Account.objects.create()
        with lock("x") as lease, contextlib.closing(private("default", 5)) as other:
            ledger_for(other).patience(other, 0)
            with lease.atomic():
                with pytest.raises(OperationalError, match="is locked"), other.cursor() as cursor:
                    cursor.execute("UPDATE tests_account SET balance = 1")
                account.save()
        assert connections["default"].transaction_mode == mode

    def test_the_stricter_mode_stays(self, mode):
        with (
            lock("x") as lease,
            CaptureQueriesContext(connections["default"]) as seen,
            lease.atomic(),
        ):
            pass
        begin = "BEGIN EXCLUSIVE" if mode == "EXCLUSIVE" else "BEGIN IMMEDIATE"
        assert begin in [query["sql"] for query in seen]


SHOW = "SHOW idle_in_transaction_session_timeout"


class TestATakeoverWaits:
    @pytest.fixture(params=["postgres", "mariadb"])
    def server(self, request, on):
        return on(request.param)

    def test_until_the_transaction_has_ended(self, server):
        lease = lock("x").acquire()
        abandon(lease)
        with lease.atomic():
            Account.objects.using(server).create()
            waiting = take("x", timeout=LONG)
            wait_until(lambda: pinned_by(lease) is not None)
            assert waiting.is_alive()
        assert waiting.outcome() == 2
        assert Account.objects.using(server).exists()
        lease.release()

    @pytest.mark.parametrize("block", ["atomic", "save", "update", "insert"])
    def test_not_longer_than_the_ttl_for_a_silent_one(self, on_postgres, block):
        """Whatever locks the fence bounds it; the one who wakes up gets an error."""
        account = Account.objects.using("postgres").create()
        lease = lock(f"account:{account.pk}", ttl=0.4).acquire()
        line = LedgerLine.objects.using("postgres").create(account=account)
        abandon(lease)
        outer = lease.atomic() if block == "atomic" else transaction.atomic(using="postgres")
        with pytest.raises(Error, match="idle-in-transaction"), outer:
            started = time.monotonic()
            if block == "save":
                line.save()
            elif block == "update":
                LedgerLine.objects.using("postgres").filter(account=account).update(amount=9)
            elif block == "insert":
                LedgerLine(account=account, amount=9).save(using="postgres")
            else:
                Account.objects.using("postgres").update(balance=9)
            started = time.monotonic()
            assert take(lease.name, timeout=LONG).outcome() == 2
            assert 0.3 < time.monotonic() - started < 5
            execute("postgres", "SELECT 1")
        connections["postgres"].close()
        assert not LedgerLine.objects.using("postgres").filter(amount=9).exists()
        assert not Account.objects.using("postgres").filter(balance=9).exists()
        lease.release()

    def test_one_who_wakes_up_to_commit_gets_the_servers_error(self, on_postgres):
        """And not `OutcomeUnknown`: nothing was committed."""
        lease = lock("x", ttl=0.1).acquire()
        abandon(lease)
        with pytest.raises(Error, match="idle-in-transaction"), lease.atomic():
            Account.objects.using("postgres").create()
            assert take("x", timeout=LONG).outcome() == 2
        connections["postgres"].close()
        assert not Account.objects.using("postgres").exists()
        lease.release()

    @pytest.mark.parametrize(
        ("own", "inside"),
        [("0", "30s"), ("200ms", "200ms"), ("7s", "7s"), ("1h", "30s"), ("2d", "30s")],
    )
    def test_the_users_own_limit_counts_if_it_is_smaller(self, on_postgres, own, inside):
        execute("postgres", f"SET idle_in_transaction_session_timeout = '{own}'")
        before = execute("postgres", SHOW)
        with lock("x", ttl=30) as lease:
            with lease.atomic():
                assert execute("postgres", SHOW) == (inside,)
            assert execute("postgres", SHOW) == before
        connections["postgres"].close()

    def test_the_smallest_of_several_ttls_counts(self, on_postgres):
        with lock("x", ttl=5) as x, lock("y", ttl=60) as y, x.atomic(), y.atomic():
            assert execute("postgres", SHOW) == ("5s",)

    def test_a_ttl_that_is_longer_than_the_server_can_count(self, on_postgres):
        with lock("x", ttl=timedelta(days=60)) as lease, lease.atomic():
            assert execute("postgres", SHOW) == ("2147483647ms",)

    def test_a_save_sets_it_only_where_a_transaction_stays_open(self, on_postgres):
        invoice = Invoice.objects.using("postgres").create()
        with invoice.fencing.lock(ttl=30):
            with CaptureQueriesContext(connections["postgres"]) as seen:
                invoice.save()
            assert not any("set_config" in query["sql"] for query in seen)
            with autocommit_off("postgres"):
                invoice.save()
                assert execute("postgres", SHOW) == ("30s",)
        assert execute("postgres", SHOW) == ("0",)


def wait_until(condition):
    until = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def pinned_by(lease):
    with contextlib.closing(private(lease.database, 5)) as session:
        return ledger_for(session).pinned_by(session, lease.name)


class TestWhatTheWaitingOneIsTold:
    """An open transaction of a former holder has no lock that the service knows of."""

    def refused(self, lease, timeout=0.3):
        """The error of somebody who waits for the lock while the lease's transaction is open."""
        waiting = take(lease.name, timeout)
        waiting.join(LONG)
        assert isinstance(waiting.error, LockNotAcquired)
        return str(waiting.error)

    def session(self, database):
        sql = "SELECT pg_backend_pid()" if database == "postgres" else "SELECT CONNECTION_ID()"
        return execute(database, sql)[0]

    @pytest.mark.parametrize("backend", ["database.DatabaseBackend", "postgres.PostgresBackend"])
    def test_the_session_on_postgres(self, on, backend):
        on("postgres", backend)
        execute("postgres", "SET application_name = 'night shift'")
        with lock("x") as first:
            pass
        # Its transaction goes on though the lock is free: as after the loss of the session's lock.
        with transaction.atomic(using="postgres"):
            execute("postgres", "SELECT 1 FROM django_fencedlock_fence FOR SHARE")
            words = self.refused(first)
            pid = self.session("postgres")
        told = f"server session {pid} of 'night shift', idle in transaction, begun "
        assert re.search(rf"{re.escape(told)}\d+\.\d s ago\.", words)
        assert "has to wait for its end" in words
        connections["postgres"].close()

    def test_the_last_holder_as_well(self, on_postgres):
        lease = lock("x").acquire()
        abandon(lease)
        with lease.atomic():
            words = self.refused(lease)
        assert f"its last holder was {lease.holder}" in words
        lease.release()

    @pytest.mark.parametrize("server", ["postgres", "mariadb"])
    def test_the_transaction_if_redis_has_the_locks(self, on_redis, server):
        """The lock itself is free there: it has forgotten the holder, or given up on him."""
        on_redis(server)
        lease = lock("x").acquire()
        lose_by_redis(lease)
        abandon(lease)
        with lease.atomic():
            words = self.refused(lease)
            session = self.session(server)
        assert "free, but a transaction under a former grant is still open" in words
        assert (f"server session {session}" in words) is (server == "postgres")
        assert f"its last holder was {lease.holder}" in words
        # Whoever waited in vain has given the lock back.
        assert lock("x", blocking_timeout=0).acquire().release()

    def test_one_who_waits_at_redis_gets_the_lock_when_the_transaction_ends(self, on_redis):
        on_redis("postgres")
        lease = lock("x").acquire()
        lose_by_redis(lease)
        with lease.atomic():
            waiting = take("x", LONG)
            wait_until(keys_of_redis)
        assert waiting.outcome() > lease.token

    def test_the_holder_as_ever_if_redis_knows_him(self, on_redis):
        on_redis("postgres")
        with lock("x") as lease, lease.atomic():
            words = self.refused(lease)
        assert f"held by {lease.holder}" in words
        assert "former grant" not in words

    def test_of_several_transactions_none_is_named(self, on_postgres):
        lease = lock("x").acquire()
        abandon(lease)
        with contextlib.closing(private("postgres", 5)) as other, lease.atomic():
            with other.cursor() as cursor:
                cursor.execute("BEGIN")
                cursor.execute("SELECT 1 FROM django_fencedlock_fence FOR SHARE")
            words = self.refused(lease)
        assert "the next grant has to wait for its end" in words
        assert "server session" not in words
        lease.release()

    def test_mariadb_names_no_session(self, on):
        on("mariadb")
        lease = lock("x").acquire()
        abandon(lease)
        with lease.atomic():
            words = self.refused(lease)
            assert pinned_by(lease) == "an open transaction"
        assert "the next grant has to wait for its end" in words
        assert "server session" not in words
        assert pinned_by(lease) is None
        lease.release()

    @pytest.mark.parametrize("server", ["postgres", "mariadb"])
    def test_it_is_found_out_long_before_the_time_limit(self, on, server):
        on(server)
        lease = lock("x").acquire()
        abandon(lease)
        with lease.atomic(), contextlib.closing(private(server, LONG)) as session:
            started = time.monotonic()
            assert ledger_for(session).pinned_by(session, "x")
            assert time.monotonic() - started < LONG / 3
        lease.release()

    @pytest.mark.parametrize("server", ["postgres", "mariadb"])
    def test_another_one_who_waits_is_not_taken_for_the_holder(self, on, server):
        """On MariaDB one has the row of the lock already while the fence is waited for."""
        on(server)
        lease = lock("x").acquire()
        abandon(lease)
        entry = Entry("x", "default", "database", new_owner(), ttl=30, fenced=False)
        with lease.atomic(), contextlib.closing(private(server, 5)) as session:
            assert ledger_for(session).claim(session, entry)[0]
            words = str(service("default").refusal("x", 1.0))
        assert "has to wait for its end" in words
        assert "last holder" not in words
        lease.release()

    def test_nothing_of_the_kind_if_the_fence_is_free(self, database):
        """The holder has just gone."""
        lock("x").acquire().release()
        assert "can't be told" in str(service("default").refusal("x", 1.0))

    def test_a_holder_who_is_alive_is_told_as_ever(self, database):
        with lock("x") as lease:
            assert f"held by {lease.holder}" in str(service("default").refusal("x", 1.0))


class TestACommitWithoutAnAnswer:
    @pytest.fixture(params=["postgres", "mariadb"])
    def proxied(self, request, make_proxy, make_alias, on):
        """An alias whose connections go through a network that can fail, and that network."""
        server = request.getfixturevalue(f"make_{request.param}")()
        if request.param == "mariadb":
            server.execute("CREATE DATABASE IF NOT EXISTS fencedlock")
        proxy = make_proxy(server.host, server.port)
        alias = make_alias({**server.django(), "HOST": proxy.host, "PORT": str(proxy.port)})
        on(alias)
        return alias, proxy

    @pytest.mark.parametrize(
        ("cut", "committed"), [({"to_client": 1}, True), ({"to_server": 1}, False)]
    )
    def test_its_outcome_is_unknown(self, proxied, cut, committed):
        alias, proxy = proxied
        tried = []
        with (
            pytest.raises(OutcomeUnknown, match="read again before anything") as caught,
            lock("x") as lease,
            lease.atomic(),
        ):
            tried.append(Account.objects.using(alias).create())
            proxy.cut_after(**cut)
        assert isinstance(caught.value.__cause__, Error)
        assert caught.value.token == 1
        assert len(tried) == 1
        connections[alias].close()
        wait_until(lambda: Account.objects.using(alias).exists() == committed)
        assert not connections[alias].in_atomic_block

    def test_an_error_before_it_is_the_errors_own(self, proxied):
        alias, proxy = proxied
        with pytest.raises(Error), lock("x") as lease, lease.atomic():
            Account.objects.using(alias).create()
            # For good: Django fails to connect anew, and raises that instead.
            proxy.retarget(proxy.host, free_port())
            proxy.cut()
            Account.objects.using(alias).create()
        connections[alias].close()

    def test_nor_is_one_known_that_django_takes_for_no_database_error(self, on, monkeypatch):
        on("mariadb")
        with lock("x") as lease, pytest.raises(OutcomeUnknown), lease.atomic():
            driver = connections["mariadb"].connection

            def commit():
                driver._force_close()
                raise pymysql.err.InterfaceError(0, "")

            monkeypatch.setattr(driver, "commit", commit)
        connections["mariadb"].close()

    def test_an_error_that_is_the_answer_is_known(self, on_postgres):
        """Foreign keys are looked at by COMMIT, which then rolls back."""
        with lock("x") as lease, pytest.raises(IntegrityError), lease.atomic():
            Account.objects.using("postgres").create()
            execute("postgres", "INSERT INTO tests_ledgerline (account_id, amount) VALUES (-1, 1)")
        assert not Account.objects.using("postgres").exists()

    def test_an_error_after_it_is_known_too(self, database):
        def fail():
            raise OperationalError("of a hook")

        with (
            lock("x") as lease,
            pytest.raises(OperationalError, match="of a hook"),
            lease.atomic(),
        ):
            Account.objects.using(database).create()
            transaction.on_commit(fail, using=database)
        assert Account.objects.using(database).exists()


class TestHighWater:
    """What the weaker mode lets happen, and what it doesn't."""

    def schedule(self, monkeypatch, mode):
        monkeypatch.setattr(Invoice, "fencing", Fencing(mode=mode))
        invoice = Invoice.objects.using("postgres").create()
        former = invoice.fencing.lock().acquire()
        invoice.amount = 10
        invoice.save(lease=former)
        abandon(former)
        newer = Elsewhere(lambda: invoice.fencing.lock().acquire()).outcome()
        service("default").keeper.forget(newer)
        read = Invoice.objects.using("postgres").get()
        return invoice, former, read, newer

    def add(self, invoice, amount, lease):
        invoice.amount += amount
        invoice.save(lease=lease)

    def test_an_update_of_the_former_holder_can_get_lost(self, on_postgres, monkeypatch):
        invoice, former, read, newer = self.schedule(monkeypatch, "high_water")
        self.add(invoice, 100, former)  # Accepted, though a newer grant was recorded.
        self.add(read, 5, newer)
        assert Invoice.objects.using("postgres").get().amount == 15
        # Once the newer one has written, the former one can't: the row's token never goes down.
        with pytest.raises(StaleFence, match="under token 2 already"):
            self.add(invoice, 100, former)
        found = Invoice.objects.using("postgres").get()
        assert (found.amount, found.fence) == (15, 2)
        former.release()

    def test_serialised_refuses_it_from_the_grant_on(self, on_postgres, monkeypatch):
        invoice, former, read, newer = self.schedule(monkeypatch, "serialised")
        with pytest.raises(StaleFence, match="the newest token is 2"):
            self.add(invoice, 100, former)
        self.add(read, 5, newer)
        assert Invoice.objects.using("postgres").get().amount == 15
        former.release()
