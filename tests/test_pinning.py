"""`lease.atomic()`, how long the next grant waits for it, and what the waiter's error says."""

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
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.storage.connections import private, set_busy_timeout
from django_fencedlock.storage.dialect import Entry
from django_fencedlock.storage.fenced_atomic import grant_of, is_pinned
from django_fencedlock.storage.vendors import LEDGERS
from tests.failing import raising
from tests.threads import beside

from .models import Account, Invoice, LedgerLine
from .servers import shared
from .servers.process import free_port, wait_until

DATABASES = ["default", "postgres", "mariadb"]
SERVERS = ["postgres", "mariadb"]
LONG = 20

pytestmark = pytest.mark.django_db(transaction=True, databases=DATABASES)


@pytest.fixture
def on(settings):
    def use(database, backend="database.DatabaseBackend", **terms):
        path = f"django_fencedlock.backends.{backend}"
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": database, "BACKEND": path, **terms}}
        return database

    return use


@pytest.fixture(params=DATABASES)
def database(request, on):
    return on(request.param)


@pytest.fixture(params=SERVERS)
def server(request, on):
    return on(request.param)


@pytest.fixture
def on_postgres(on):
    on("postgres")


@pytest.fixture
def on_redis(on, redis_server):
    redis_server.empty()
    return lambda database: on(database, "redis.RedisBackend", LOCATION=redis_server.url)


def lose_by_redis(lease):
    service("default").keeper.forget(lease)
    shared.redis().empty()


def keys_of_redis():
    with shared.redis().client() as client:
        return client.keys("*")


def abandon(lease):
    """Stop the renewals of a lease, as if its process hung, and let it expire."""
    service("default").keeper.forget(lease)
    held = HeldLock.objects.using(lease.database).filter(name=lease.name)
    held.update(expires_at=timezone.now() - timedelta(hours=1))


@pytest.fixture
def abandoned():
    leases = []

    def make(name="x", **terms):
        leases.append(lock(name, **terms).acquire())
        abandon(leases[0])
        return leases[0]

    yield make
    for lease in leases:
        lease.release()


def overtake(lease):
    abandon(lease)
    entry = Entry(lease.name, "default", "database", new_owner(), ttl=30)
    with contextlib.closing(private(lease.database, 5)) as session:
        assert LEDGERS[session.vendor].claim(session, entry)[0]


def take(name, timeout=0.0):
    def enter():
        with lock(name, blocking_timeout=timeout) as lease:
            return lease.token

    return beside(enter)


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


def accounts(database):
    return Account.objects.using(database)


def never_entered(lease, error, match=None, **terms):
    with pytest.raises(error, match=match) as caught, lease.atomic(**terms):
        pytest.fail("the block was entered")
    return caught.value


class TestWhatIsInside:
    def test_everything_is_committed_together(self, database):
        account = accounts(database).create()
        group = Group.objects.using(database).create(name="g")
        with lock("x") as lease, lease.atomic():
            account.balance = 1
            account.save()
            execute(database, "UPDATE tests_account SET name = 'raw' WHERE id = %s", account.pk)
            group.permissions.add(Permission.objects.using(database).first())
        account.refresh_from_db()
        assert (account.balance, account.name) == (1, "raw")
        assert group.permissions.count() == 1
        with lock("x") as lease, lease.atomic():
            group.delete()
        assert not Group.objects.using(database).exists()

    def test_a_former_holder_gets_nothing_done(self, database):
        lease = lock("x").acquire()
        overtake(lease)
        error = never_entered(lease, StaleFence, r"newest token is 2, granted to .*pid")
        assert (error.token, error.holder.token) == (1, 2)
        assert not connections[database].in_atomic_block
        Fence.objects.using(database).all().delete()
        never_entered(lease, StaleFence, "its fence is gone")
        lease.release()

    def test_an_error_rolls_all_of_it_back(self, database):
        with lock("x") as lease, pytest.raises(ZeroDivisionError), lease.atomic():
            accounts(database).create()
            raise ZeroDivisionError
        assert not accounts(database).exists()

    def test_the_fence_is_looked_at_once(self, database):
        invoice = Invoice.objects.using(database).create()
        connection = connections[database]
        with invoice.fencing.lock() as lease:
            with CaptureQueriesContext(connection) as seen, lease.atomic():
                invoice.save()
                invoice.save()
                Invoice.objects.using(database).filter(pk=invoice.pk).update(note="n")
                Invoice.objects.using(database).bulk_update([invoice], ["note"])
            statements = [query["sql"] for query in seen]
            about_fences = [sql for sql in statements if "django_fencedlock_fence" in sql]
            assert len(about_fences) == 1
            assert re.match("SELECT .+ FROM django_fencedlock_fence WHERE name", about_fences[0])
            assert len([sql for sql in statements if sql.startswith("UPDATE")]) == 4
            with CaptureQueriesContext(connection) as seen:
                invoice.save()
            assert "django_fencedlock_fence" in seen.captured_queries[-1]["sql"]

    def test_a_fenced_row_needs_its_own_lease_all_the_same(self, database):
        invoice = Invoice.objects.using(database).create()
        why = rf"invoice:{invoice.pk}.*'x'"
        with lock("x") as lease, pytest.raises(LockRequired, match=why), lease.atomic():
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
                accounts(database).create()
                invoice.save()
            assert not accounts(database).exists()
            own.release()

    def test_a_context_that_outlives_the_block_has_nothing_pinned(self, database):
        """A task that was started within the block has such a context."""
        connection = connections[database]
        with lock("x") as lease:
            with lease.atomic():
                assert is_pinned(connection, grant_of(lease))
                context = contextvars.copy_context()
            assert not context.run(is_pinned, connection, grant_of(lease))
            with transaction.atomic(using=database):
                assert not context.run(is_pinned, connection, grant_of(lease))

    def test_another_thread_or_connection_has_nothing_pinned(self, on_postgres):
        with lock("x") as lease, contextlib.suppress(Error), lease.atomic():
            context = contextvars.copy_context()
            grant = grant_of(lease)
            there = beside(lambda: context.run(is_pinned, connections["postgres"], grant))
            assert not there.result(LONG)
            connections["postgres"].close()
            connections["postgres"].connect()
            assert not is_pinned(connections["postgres"], grant)

    def test_it_works_from_a_coroutine(self, database):
        def work(lease):
            with lease.atomic():
                return accounts(database).create().pk

        async def main():
            async with lock("x") as lease:
                return await sync_to_async(work)(lease)

        made = async_to_sync(main)()
        assert accounts(database).get().pk == made


class TestWhereItIsAllowed:
    def test_not_inside_a_transaction(self, database):
        with lock("x") as lease:
            with transaction.atomic(using=database):
                never_entered(
                    lease,
                    InsideTransaction,
                    rf"^lease\.atomic\(\) of lock 'x' is inside a transaction on '{database}', and "
                    r"has to be the outermost block\. Open it first; a view under ATOMIC_REQUESTS "
                    r"needs @transaction\.non_atomic_requests\.$",
                )
            with autocommit_off(database):
                never_entered(lease, InsideTransaction, "Open it first")
        invoice = Invoice.objects.using(database).create()
        with invoice.fencing.lock() as lease, transaction.atomic(using=database):
            invoice.save()  # It locks the fence.
            never_entered(lease, InsideTransaction)

    def test_not_inside_a_savepoint_of_another_one(self, database):
        with lock("x") as x, lock("y") as y, x.atomic(), transaction.atomic(using=database):
            never_entered(y, InsideTransaction)

    def test_directly_inside_another_one(self, database):
        with lock("x") as x, lock("y") as y, x.atomic():
            with y.atomic(), x.atomic():
                accounts(database).create()
                assert is_pinned(connections[database], grant_of(x))
                assert is_pinned(connections[database], grant_of(y))
            # It is still locked: the inner block was no transaction of its own.
            if database != "default":
                assert pinned_by(y) is not None
        assert accounts(database).count() == 1

    def test_what_fails_inside_another_one_fails_both(self, database):
        with lock("x") as x:
            y = lock("y").acquire()
            with x.atomic(), pytest.raises(ZeroDivisionError), y.atomic():
                accounts(database).create()
                raise ZeroDivisionError
            assert not accounts(database).exists()
            overtake(y)
            with x.atomic():
                accounts(database).create()
                never_entered(y, StaleFence)
            assert not accounts(database).exists()
            y.release()

    def test_not_on_another_database(self, on_postgres):
        with lock("x") as lease:
            never_entered(lease, WrongDatabase, "'postgres', and only", using="default")

    def test_not_without_a_live_fenced_lease(self, database):
        with lock("x", fenced=False) as lease:
            never_entered(lease, Unfenced)
        with lock("x") as lease:
            pass
        never_entered(lease, LeaseLost, "it was released")
        lease = lock("x").acquire()
        service("default").lose(lease, "as a test")
        never_entered(lease, LeaseLost, "as a test")
        lease.release()

    def test_under_a_lease_that_expired_while_the_lock_was_free(self, database):
        """A pause costs nothing unless another holder acquired the lock."""
        with lock("x", ttl=0.5) as lease:
            service("default").keeper.forget(lease)
            while not lease.expired:
                time.sleep(0.01)
            with lease.atomic():
                accounts(database).create()
        assert accounts(database).exists()


@pytest.mark.django_db(databases=DATABASES)
def test_inside_a_testcase_it_works_and_nests(database):
    with lock("x") as x, lock("y") as y:
        with x.atomic(), y.atomic():
            accounts(database).create()
        with pytest.raises(ZeroDivisionError), x.atomic():
            accounts(database).create()
            raise ZeroDivisionError
        assert accounts(database).count() == 1
        with transaction.atomic(using=database):  # one of the code under test
            never_entered(x, InsideTransaction)


class TestARollbackByTheDatabase:
    """Code that goes on after it would go on in a transaction that has nothing locked."""

    def test_mariadb_rolls_back_at_a_deadlock(self, on):
        on("mariadb")
        one, two = (accounts("mariadb").create() for _ in range(2))
        add = "UPDATE tests_account SET balance = balance + %s WHERE id = %s"
        locked, wanted = threading.Event(), threading.Event()

        def other():
            with transaction.atomic(using="mariadb"):
                # InnoDB ends the one that has written less.
                accounts("mariadb").bulk_create(Account() for _ in range(50))
                execute("mariadb", add, 10, two.pk)
                locked.set()
                wanted.wait(LONG)
                execute("mariadb", add, 10, one.pk)

        thread = beside(other)
        assert locked.wait(LONG)
        with lock("x") as lease, lease.atomic():
            execute("mariadb", add, 1, one.pk)
            wanted.set()
            with pytest.raises(OperationalError, match="1213"):
                execute("mariadb", add, 1, two.pk)
            with pytest.raises(TransactionManagementError):
                execute("mariadb", add, 1, one.pk)
        thread.result(LONG)
        balances = accounts("mariadb").filter(pk__in=[one.pk, two.pk])
        assert [account.balance for account in balances] == [10, 10]

    def test_sqlite_does_on_request(self, on):
        on("default")
        account = Account.objects.create()
        add = "INSERT OR ROLLBACK INTO tests_account (id, name, balance) VALUES (%s, '', 1)"
        with lock("x") as lease, lease.atomic():
            for pk, error in ((account.pk, IntegrityError), (-1, TransactionManagementError)):
                with pytest.raises(error):
                    execute("default", add, pk)
        assert Account.objects.count() == 1

    def test_an_error_of_one_statement_leaves_the_rest(self, on):
        on("mariadb")
        with lock("x") as lease, lease.atomic():
            accounts("mariadb").create()
            with pytest.raises(Error):
                execute("mariadb", "SELECT nothing FROM nowhere")
        assert accounts("mariadb").exists()


@pytest.mark.parametrize("mode", [None, "DEFERRED", "EXCLUSIVE"])
def test_sqlite_locks_the_file_at_the_beginning(on, monkeypatch, mode):
    """Otherwise a write of another session, such as a renewal, makes the first write fail."""
    on("default")
    connection = connections["default"]
    connection.ensure_connection()
    monkeypatch.setattr(connection, "transaction_mode", mode)
    account = Account.objects.create()
    with lock("x") as lease, contextlib.closing(private("default", 5)) as other:
        set_busy_timeout(other, 0)
        with CaptureQueriesContext(connection) as seen, lease.atomic():
            with pytest.raises(OperationalError, match="is locked"), other.cursor() as cursor:
                cursor.execute("UPDATE tests_account SET balance = 1")
            account.save()
    assert connection.transaction_mode == mode
    begin = "BEGIN EXCLUSIVE" if mode == "EXCLUSIVE" else "BEGIN IMMEDIATE"
    assert begin in [query["sql"] for query in seen]


SHOW = "SHOW idle_in_transaction_session_timeout"


class TestTheNextGrantWaits:
    def test_until_the_transaction_has_ended(self, server, abandoned):
        lease = abandoned()
        with lease.atomic():
            accounts(server).create()
            waiting = take("x", timeout=LONG)
            wait_until(lambda: pinned_by(lease) is not None, "the transaction is found")
            assert not waiting.done()
        assert waiting.result(LONG) == 2
        assert accounts(server).exists()

    @pytest.mark.parametrize("block", ["atomic", "save", "update", "insert"])
    def test_not_longer_than_the_ttl_for_a_silent_one(self, on_postgres, abandoned, block):
        """All that locks the fence bounds the wait. The former holder gets an error later."""
        account = accounts("postgres").create()
        lines = LedgerLine.objects.using("postgres")
        with lock(f"account:{account.pk}"):
            line = lines.create(account=account)
        lease, started = abandoned(f"account:{account.pk}", ttl=0.4), time.monotonic()
        outer = lease.atomic() if block == "atomic" else transaction.atomic(using="postgres")
        with pytest.raises(Error, match="idle-in-transaction"), outer:
            if block == "save":
                line.save()
            elif block == "update":
                lines.filter(account=account).update(amount=9)
            elif block == "insert":
                LedgerLine(account=account, amount=9).save(using="postgres")
            else:
                accounts("postgres").update(balance=9)
            assert take(lease.name, timeout=LONG).result(LONG) == 3
            assert time.monotonic() - started > 0.3
            execute("postgres", "SELECT 1")
        connections["postgres"].close()
        assert not lines.filter(amount=9).exists()
        assert not accounts("postgres").filter(balance=9).exists()

    def test_one_that_wakes_up_to_commit_gets_the_servers_error(self, on_postgres, abandoned):
        """Not `OutcomeUnknown`: nothing was committed."""
        lease = abandoned(ttl=0.1)
        with pytest.raises(Error, match="idle-in-transaction"), lease.atomic():
            accounts("postgres").create()
            assert take("x", timeout=LONG).result(LONG) == 2
        connections["postgres"].close()
        assert not accounts("postgres").exists()

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
        # The server can count no further.
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


def pinned_by(lease):
    with contextlib.closing(private(lease.database, 5)) as session:
        return LEDGERS[session.vendor].pinned_by(session, lease.name)


class TestWhatTheWaitersErrorSays:
    """An open transaction of a former holder has no lock that the service knows of."""

    def refused(self, lease, timeout=0.3):
        error = take(lease.name, timeout).exception(LONG)
        assert isinstance(error, LockNotAcquired)
        return str(error)

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
        found = f"server session {pid} of 'night shift', idle in transaction, begun "
        assert re.search(rf"{re.escape(found)}\d+\.\d s ago\.", words)
        assert "has to wait for" in words
        connections["postgres"].close()

    @pytest.mark.parametrize("several", [False, True])
    def test_the_last_holder_is_named_as_well(self, on_postgres, abandoned, several):
        lease = abandoned()
        with contextlib.closing(private("postgres", 5)) as other, lease.atomic():
            if several:
                with other.cursor() as cursor:
                    cursor.execute("BEGIN")
                    cursor.execute("SELECT 1 FROM django_fencedlock_fence FOR SHARE")
            words = self.refused(lease)
        assert f"its last holder was {lease.holder}" in words
        assert "has to wait for an open transaction" in words or not several
        assert ("server session" in words) is not several

    @pytest.mark.parametrize("server", SERVERS)
    def test_the_transaction_if_redis_has_the_locks(self, on_redis, server):
        """The lock itself is free there: Redis lost it, or it expired."""
        on_redis(server)
        lease = lock("x").acquire()
        lose_by_redis(lease)
        abandon(lease)
        with lease.atomic():
            words = self.refused(lease)
            session = self.session(server)
        assert "free, but the next grant on " in words
        assert (f"server session {session}" in words) is (server == "postgres")
        assert f"its last holder was {lease.holder}" in words
        assert lock("x", blocking_timeout=0).acquire().release()

    def test_a_waiter_at_redis_gets_the_lock_when_the_transaction_ends(self, on_redis):
        on_redis("postgres")
        lease = lock("x").acquire()
        lose_by_redis(lease)
        with lease.atomic():
            waiting = take("x", LONG)
            wait_until(keys_of_redis, "a key of the waiter")
        assert waiting.result(LONG) > lease.token

    def test_the_holder_if_redis_knows_it(self, on_redis):
        on_redis("postgres")
        with lock("x") as lease, lease.atomic():
            words = self.refused(lease)
        assert f"held by {lease.holder}" in words
        assert "next grant" not in words

    def test_mariadb_names_no_session(self, on, abandoned):
        on("mariadb")
        lease = abandoned()
        with lease.atomic():
            words = self.refused(lease)
            assert pinned_by(lease) == "an open transaction"
        assert "has to wait for an open transaction" in words
        assert "server session" not in words
        assert pinned_by(lease) is None

    def test_the_transaction_is_found_long_before_the_time_limit(self, server, abandoned):
        with abandoned().atomic(), contextlib.closing(private(server, LONG)) as session:
            started = time.monotonic()
            assert LEDGERS[session.vendor].pinned_by(session, "x")
            assert time.monotonic() - started < LONG / 3

    def test_another_waiter_is_not_taken_for_the_holder(self, server, abandoned):
        """On MariaDB one has the row of the lock already while it waits for the fence."""
        entry = Entry("x", "default", "database", new_owner(), ttl=30, fenced=False)
        with abandoned().atomic(), contextlib.closing(private(server, 5)) as session:
            assert LEDGERS[session.vendor].claim(session, entry)[0]
            words = str(service("default").grants.refusal("x", 1.0))
        assert "has to wait for" in words
        assert "last holder" not in words

    def test_nothing_of_the_kind_if_the_fence_is_free(self, database):
        lock("x").acquire().release()
        assert "held by an unknown holder" in str(service("default").grants.refusal("x", 1.0))
        with lock("x") as lease:
            assert f"held by {lease.holder}" in str(service("default").grants.refusal("x", 1.0))


@pytest.mark.slow
class TestACommitWithoutAnAnswer:
    @pytest.fixture(params=["postgres", "mariadb"])
    def proxied(self, request, make_proxy, make_alias, on):
        server = request.getfixturevalue(f"make_{request.param}")()
        if request.param == "mariadb":
            server.execute("CREATE DATABASE IF NOT EXISTS fencedlock")
        proxy = make_proxy(server.host, server.port)
        alias = make_alias(server.django(by=proxy))
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
            tried.append(accounts(alias).create())
            proxy.cut_after(**cut)
        assert isinstance(caught.value.__cause__, Error)
        assert caught.value.token == 1
        assert len(tried) == 1
        connections[alias].close()
        wait_until(lambda: accounts(alias).exists() == committed, "the outcome")
        assert not connections[alias].in_atomic_block

    def test_an_error_before_it_is_the_errors_own(self, proxied):
        alias, proxy = proxied
        with pytest.raises(Error), lock("x") as lease, lease.atomic():
            accounts(alias).create()
            # For good: Django fails to connect anew, and raises that instead.
            proxy.retarget(proxy.host, free_port())
            proxy.cut()
            accounts(alias).create()
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
            accounts("postgres").create()
            execute("postgres", "INSERT INTO tests_ledgerline (account_id, amount) VALUES (-1, 1)")
        assert not accounts("postgres").exists()

    def test_an_error_after_it_is_known_too(self, database):

        with lock("x") as lease, pytest.raises(OperationalError, match="of a hook"), lease.atomic():
            accounts(database).create()
            transaction.on_commit(raising(OperationalError("of a hook")), using=database)
        assert accounts(database).exists()
