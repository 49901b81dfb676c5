"""The rooms of the postgres backend one by one: its jobs, waiting sessions, and statements."""

# The fixtures of its sister are used here.
# ruff: noqa: F811

import math
import signal
import threading
from functools import partial

import pytest
from django.db import DatabaseError, connections

from django_fencedlock.backends import postgres_home, postgres_taking, postgres_waiting
from django_fencedlock.backends import postgres_statements as statements
from django_fencedlock.backends.base import Cancel, Renewal
from django_fencedlock.backends.postgres_home import Home
from django_fencedlock.backends.postgres_hung import end_hung_holders
from django_fencedlock.backends.postgres_sessions import PoolsTransactions, open_session
from django_fencedlock.backends.postgres_threads import Bell, GreenBell, Job, Unanswered
from django_fencedlock.backends.postgres_waiting import Room
from django_fencedlock.core import runtime
from django_fencedlock.core.runtime import clock
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.models import HeldLock
from tests.servers.process import wait_until
from tests.test_postgres_backend import (  # noqa: F401
    ALIAS,
    backend,
    database,
    expire,
    lease_of,
    make,
    name,
    peer,
    request_for,
    take,
)

POSTGRES = pytest.mark.usefixtures("database")


class TestJobs:
    """Work for the thread that has the sessions."""

    def test_what_nobody_waits_for_any_more_is_not_begun(self):
        done = []
        job = Job(lambda: done.append("work"), lambda value: done.append("undo"))
        with pytest.raises(Unanswered):
            job.result(0.0, leave=lambda job: done.append("leave"))
        job.run()
        assert done == []

    def test_without_an_undo_it_is_done_all_the_same(self):
        done = []
        job = Job(lambda: done.append("work"))
        with pytest.raises(Unanswered):
            job.result(0.0, leave=lambda job: None)
        job.run()
        assert done == ["work"]

    def test_what_was_given_up_meanwhile_is_undone(self):
        done, under_way, go_on = [], threading.Event(), threading.Event()

        def work():
            under_way.set()
            assert go_on.wait(20)
            done.append("work")

        job = Job(work, lambda value: done.append("undo"))
        thread = threading.Thread(target=job.run)
        thread.start()
        assert under_way.wait(20)
        with pytest.raises(Unanswered):
            job.result(0.0, leave=lambda job: done.append("leave"))
        go_on.set()
        thread.join(20)
        assert done == ["work", "undo"]

    def test_what_was_done_for_one_who_is_thrown_out_is_left_to_be_undone(self):
        done = []
        job = Job(lambda: done.append("work"), lambda value: done.append("undo"))
        job._bell.wait = self._throw
        job.run()
        with pytest.raises(KeyboardInterrupt):
            job.result(1.0, leave=lambda job: job.undo())
        assert done == ["work", "undo"]

    def _throw(self, timeout):
        raise KeyboardInterrupt

    @pytest.mark.parametrize("bell", [Bell, GreenBell])
    def test_an_answer_that_came_during_a_pause_of_the_caller_is_returned(self, bell):
        job = Job(lambda: "answer")
        job._bell = bell()
        job.run()
        # The deadline passed while the process was stopped.
        assert job.result(-3.5, leave=lambda job: None) == "answer"

    @pytest.mark.parametrize("bell", [Bell, GreenBell])
    def test_a_job_without_an_answer_is_undone_after_a_pause_of_the_caller(self, bell):
        done = []
        job = Job(lambda: done.append("work"), lambda value: done.append("undo"))
        job._bell = bell()
        with pytest.raises(Unanswered):
            job.result(-3.5, leave=lambda job: done.append("leave"))
        job.run()
        assert done == []


class FakeSession:
    def __init__(self, quiet=True):
        self.closed, self.quiet, self.cancels = False, quiet, 0

    def is_quiet(self):
        return self.quiet

    def close(self):
        self.closed = True

    def cancel(self):
        self.cancels += 1


class TestTheThread:
    def test_one_that_could_not_be_started_is_started_by_the_next_job(self, monkeypatch):
        def refuse(target):
            raise RuntimeError("can't start new thread")

        done, home = [], Home("nowhere", 5.0)
        monkeypatch.setattr(runtime, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            home.ask(lambda: done.append("first"))
        monkeypatch.undo()
        home.ask(lambda: done.append("second"))
        assert done == ["second"]

    @pytest.fixture
    def home(self, monkeypatch):
        """A home that notes for whom it looks after hung holders, and asks no server."""
        home = Home("nowhere", 5.0)
        home.looks = []
        monkeypatch.setattr(home, "session", lambda: None)
        monkeypatch.setattr(
            postgres_home, "end_hung_holders", lambda session, names: home.looks.append(names)
        )
        return home

    def test_it_is_not_woken_for_one_more_who_waits(self, home, monkeypatch):
        with home.awaiting(1, "x"):
            wait_until(lambda: home._next_look < math.inf, "a look that is due")
            monkeypatch.setattr(home, "rouse", lambda: pytest.fail("woken"))
            with home.awaiting(2, "y"):
                wait_until(lambda: home.looks, "the look")
        assert home.looks[0] == ["x", "y"]

    def test_it_looks_for_nobody_who_could_not_wake_it(self, home, monkeypatch):
        def refuse(target):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(runtime, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"), home.awaiting(1, "x"):
            pass
        assert not home.awaited

    def test_it_looks_for_who_waits_after_a_look_for_nobody(self, home, monkeypatch):
        monkeypatch.setattr(postgres_home, "LOOK_EVERY", 0.01)
        with home.awaiting(1, "x"):
            wait_until(lambda: home.looks, "the look")
        wait_until(lambda: math.isinf(home._next_look), "nothing that is due")
        home.looks.clear()
        with home.awaiting(2, "y"):
            wait_until(lambda: home.looks, "the look")
        assert home.looks[0] == ["y"]


class TestTheWaitingRoom:
    @pytest.fixture
    def room(self, monkeypatch):
        monkeypatch.setattr(postgres_waiting, "open_session", lambda *args, **more: FakeSession())
        monkeypatch.setattr(postgres_waiting, "under_test", lambda: False)
        return Room("unused", 1.0)

    def test_a_session_that_died_while_idle_is_not_waited_on(self, room):
        first = room.take(2)
        room.give_back(first)
        first.quiet = False
        second = room.take(2)
        assert second is not first
        assert first.closed

    def test_no_more_wait_than_may(self, room):
        first, second = room.take(2), room.take(2)
        assert room.take(2) is None
        second.close()
        assert room.take(2) is not None
        assert not first.closed

    def test_a_cancelled_wait_cancels_nothing_that_comes_later(self):
        session = FakeSession()
        interrupt = postgres_waiting._Interrupt(session)
        interrupt()
        wait_until(lambda: session.cancels, "a cancellation")
        interrupt.finish()
        before = session.cancels
        interrupt._cancel()  # as the thread would go on
        assert session.cancels == before


@pytest.fixture
def key(backend, name):
    return backend._key(name)


@POSTGRES
class TestATableThatIsChanged:
    def test_a_session_with_locks_goes_on_looking(self, backend, database, name):
        def change(length):
            with connections[ALIAS].cursor() as cursor:
                cursor.execute(
                    f"ALTER TABLE django_fencedlock_heldlock ALTER host TYPE varchar({length})"
                )

        take(backend, name)
        for _ in range(3):
            holder = backend.holder(name)
        change(120)
        try:
            assert backend.holder(name) == holder
        finally:
            change(100)


@POSTGRES
class TestTheSession:
    def test_what_is_thrown_into_the_middle_of_a_statement_ends_it(self):
        class Struck(BaseException):
            pass

        def strike(*args):
            raise Struck

        session = open_session(ALIAS, 30.0, waits=True)
        me = threading.get_ident()
        before = signal.signal(signal.SIGUSR2, strike)
        timer = threading.Timer(0.1, signal.pthread_kill, [me, signal.SIGUSR2])
        try:
            with pytest.raises(Struck):
                timer.start()
                session.one("SELECT pg_sleep(20)", {}, prepare=False)
            assert session.closed
        finally:
            timer.join()
            signal.signal(signal.SIGUSR2, before)
            session.close()

    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("idle_session_timeout", "0"),
            ("idle_in_transaction_session_timeout", "0"),
            ("statement_timeout", "0"),
            ("lock_timeout", "250ms"),
            ("synchronous_commit", "on"),
            ("default_transaction_isolation", "read committed"),
        ],
    )
    def test_no_setting_of_a_role_ends_it_or_its_locks(self, setting, value):
        with connections[ALIAS].cursor() as cursor:
            cursor.execute("SELECT current_database()")
            (found,) = cursor.fetchone()
            unlike = {"0": "'1h'", "250ms": "'1h'", "on": "off"}.get(value, "'repeatable read'")
            cursor.execute(f'ALTER DATABASE "{found}" SET {setting} = {unlike}')
        try:
            session = open_session(ALIAS, 5.0, waits=False)
            try:
                assert session.one(f"SHOW {setting}", {}, prepare=False) == (value,)
            finally:
                session.close()
        finally:
            with connections[ALIAS].cursor() as cursor:
                cursor.execute(f'ALTER DATABASE "{found}" RESET {setting}')

    @pytest.mark.parametrize("waits", [True, False])
    def test_a_peer_behind_a_cut_cable_is_given_up_in_time(self, waits):
        session = open_session(ALIAS, 5.0, waits=waits)
        try:
            names = ("tcp_user_timeout", "tcp_keepalives_idle", "tcp_keepalives_count")
            address, *told = session.one(
                "SELECT inet_client_addr(), "
                f"{', '.join(f'''current_setting('{each}')''' for each in names)}",
                {},
                prepare=False,
            )
        finally:
            session.close()
        if address is None:
            pytest.skip("the server is reached by a socket of the system, which has no cable")
        assert all(int(each.removesuffix("ms").removesuffix("s")) > 0 for each in told)


@POSTGRES
class TestGrants:
    def test_a_thread_that_came_a_moment_later_is_refused_though_the_server_is_asked(
        self, backend, name, key
    ):
        take(backend, name)
        later = request_for(name)
        # It had looked before the other one was granted.
        assert backend._ask("acquiring", partial(backend._try, later, key, clock())) is None

    def test_what_was_given_back_is_not_given_back_again(self, backend, name):
        first = take(backend, name)
        assert backend.release(first)
        second = take(backend, name)
        assert not backend.release(first)
        assert backend.verify(second)
        assert backend.renew([second]) == [Renewal.KEPT]

    def test_a_key_that_went_to_another_session_is_lost(self, backend, peer, name, key):
        lease = take(backend, name)
        session = lease.handle.session
        backend._home.ask(lambda: session.unlock(key))
        other = peer._home
        other.ask(lambda: other.session().one("SELECT pg_advisory_lock(%(key)s)", {"key": key}))
        assert not backend.verify(lease)
        assert backend.renew([lease]) == [Renewal.LOST]
        other.ask(lambda: other.session().unlock(key))

    def test_of_all_advisory_locks_of_the_server_those_held_in_this_database_count(
        self, backend, postgres, name, key
    ):
        high, low = (key >> 32), (key & 0xFFFFFFFF)
        with (
            postgres.connect() as elsewhere,
            postgres.connect(connections[ALIAS].settings_dict["NAME"]) as here,
        ):
            elsewhere.execute("SELECT pg_advisory_lock(%s)", [key])
            here.execute(
                "SELECT pg_advisory_lock(%s, %s)",
                [high, low - (1 << 32) if low >= 1 << 31 else low],
            )
            assert backend.is_free(name)
            assert backend.holder(name) is None
            lease = take(backend, name)
            waiter = threading.Thread(
                target=here.execute, args=["SELECT pg_advisory_lock(%s::bigint)", [key]]
            )
            waiter.start()
            wait_until(lambda: backend.waiting([name]) == {name: 1}, "somebody to wait")
            listed = backend._look(name, f"WITH {statements.LOCKS} SELECT k.pid FROM locks k", {})
            assert listed == [(lease.handle.session.pid,)]
            assert backend.release(lease)
            waiter.join(10)

    def test_a_row_that_is_anothers_by_now_is_lost_and_left_alone(self, backend, name):
        lease, rows = take(backend, name), HeldLock.objects.using(ALIAS).filter(name=name)
        expire(name)
        rows.update(owner="another")
        before = rows.values().get()
        assert not backend.verify(lease)
        assert backend.renew([lease]) == [Renewal.LOST]
        assert not backend.release(lease)
        assert rows.values().get() == before

    @pytest.mark.parametrize("fenced", [True, False])
    def test_what_was_lost_already_is_neither_verified_nor_renewed(self, backend, name, fenced):
        lease = take(backend, name, fenced=fenced)
        assert backend.release(lease)
        following = take(backend, name, fenced=fenced)
        assert not backend.verify(lease)
        assert backend.renew([lease, following]) == [Renewal.LOST, Renewal.KEPT]

    def test_a_release_whose_row_somebody_has_locked_frees_the_key(
        self, backend, peer, postgres, name
    ):
        lease = take(backend, name)
        with postgres.connect(connections[ALIAS].settings_dict["NAME"]) as contender:
            contender.execute("BEGIN")
            contender.execute("SELECT 1 FROM django_fencedlock_heldlock FOR UPDATE")
            assert backend.release(lease)
            assert peer.is_free(name)
            contender.execute("ROLLBACK")

    def test_one_who_was_struck_gives_back_what_is_his_alone(self, backend, name):
        lease = take(backend, name)
        backend.abandon(request_for(name))
        assert backend.verify(lease)
        assert backend._home.held == 1

    def test_an_unfenced_key_that_went_to_another_session_is_not_verified(
        self, backend, peer, name, key
    ):
        lease, other = take(backend, name, fenced=False), peer._home
        session = lease.handle.session
        backend._home.ask(lambda: session.unlock(key))
        other.ask(lambda: other.session().one("SELECT pg_advisory_lock(%(key)s)", {"key": key}))
        assert not backend.verify(lease)
        other.ask(lambda: other.session().unlock(key))

    def test_an_unfenced_lock_whose_key_is_gone_is_lost(self, backend, name, key):
        lease = take(backend, name, fenced=False)
        assert backend.renew([lease]) == [Renewal.KEPT]
        session = lease.handle.session
        backend._home.ask(lambda: session.unlock(key))
        assert backend.renew([lease]) == [Renewal.LOST]

    def test_a_pooler_that_changes_the_session_is_no_grant(self, backend, name, key):
        session = open_session(ALIAS, 5.0, waits=False)
        with pytest.raises(PoolsTransactions):
            backend._granted(
                session, request_for(name), key, lambda: (True, 1, False, session.pid + 1)
            )
        assert session.closed

    def test_the_key_of_a_name_that_is_live_elsewhere_is_free(self, backend, name, key):
        take(backend, name)
        HeldLock.objects.using(ALIAS).filter(name=name).update(alias="other")
        session = open_session(ALIAS, 5.0, waits=False)
        try:
            session.one("SELECT pg_advisory_lock(%(key)s)", {"key": key + 1})
            with pytest.raises(DatabaseError):
                session.one("SELECT 1/0", {}, prepare=False)
            with pytest.raises(Exception, match="two lock services"):
                backend._granted(
                    session, request_for(name), key + 1, lambda: (True, None, False, session.pid)
                )
            # Nothing is left to unlock.
            assert session.one("SELECT pg_advisory_unlock(%(key)s)", {"key": key + 1}) == (False,)
        finally:
            session.close()


@POSTGRES
def test_what_is_closed_when_idle_keeps_its_locks(backend, peer, name):
    lease = take(backend, name)
    session = lease.handle.session
    backend.close()
    assert not session.closed
    assert backend.verify(lease)
    assert peer.acquire(request_for(name)) is None
    assert backend.release(lease)
    backend.close()
    assert session.closed


@POSTGRES
class TestTakingUp:
    """A wait ends in the server a while before its waiter knows."""

    @pytest.fixture
    def waited(self, backend, peer, name, monkeypatch):
        """Return a function that waits, and does something just before the lock is taken up."""
        # None is so short that its grant needs no renewal.
        monkeypatch.setattr(postgres_taking, "SHORT_WAIT", 0)

        def wait(meanwhile, cancel=None):
            held = take(peer, name)
            request = request_for(name, **({} if cancel is None else {"cancel": cancel}))
            take_up = backend._take_up

            def slowly(*args):
                meanwhile()
                return take_up(*args)

            backend._take_up = slowly
            releasing = threading.Timer(0.1, peer.release, [held])
            releasing.start()
            try:
                return request, backend.wait(request, 20)
            finally:
                releasing.join()

        return wait

    def _taken(self, backend, name):
        return not backend.is_free(name)

    def test_what_was_overtaken_meanwhile_is_not_taken_up(self, backend, waited, name):
        rows = HeldLock.objects.using(ALIAS).filter(name=name)
        with pytest.raises(BackendUnavailable, match="overtaken"):
            waited(lambda: rows.update(owner="f" * 32))
        wait_until(lambda: not self._taken(backend, name), "the key")

    def test_who_was_cancelled_meanwhile_leaves_it_free(self, backend, waited, name):
        cancel = Cancel()
        _, grant = waited(cancel.cancel, cancel)
        assert grant is None
        assert backend.is_free(name)

    def test_the_lease_begins_when_it_is_taken_up(self, backend, waited, name):
        moments = []
        request, grant = waited(lambda: moments.append(clock()))
        assert grant.since >= moments[0]
        assert backend.release(lease_of(request, grant))

    def test_its_session_is_watched_and_goes_with_it(self, backend, waited, name):
        lost = []
        backend.lost_hook = lost.extend
        request, grant = waited(lambda: None)
        session = grant.handle.session
        with connections[ALIAS].cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", [session.pid])
        wait_until(lambda: lost == [request.owner.id], "the loss")

    def test_its_session_is_used_again(self, backend, waited, name):
        request, grant = waited(lambda: None)
        backend.release(lease_of(request, grant))
        assert backend._room._free == [grant.handle.session]


@POSTGRES
class TestHungHolders:
    def end(self, peer, name):
        return peer._home.ask(lambda: end_hung_holders(peer._home.session(), [name]))

    def test_one_who_keeps_another_of_his_locks_alive_is_left_alone(self, backend, peer, name):
        lease, other = take(backend, name), take(backend, f"{name}:other")
        expire(name)
        assert not self.end(peer, name)
        expire(other.name)
        assert self.end(peer, name)
        assert not backend.verify(lease)

    def test_one_whose_number_is_another_sessions_by_now_is_left_alone(self, backend, peer, name):
        lease = take(backend, name)
        expire(name)
        HeldLock.objects.using(ALIAS).filter(name=name).update(session_started="2020-01-01T00:00Z")
        assert not self.end(peer, name)
        assert not lease.handle.session.closed

    def test_one_who_has_another_lock_than_the_row_tells_is_left_alone(
        self, backend, peer, name, key
    ):
        lease = take(backend, name)
        expire(name)
        HeldLock.objects.using(ALIAS).filter(name=name).update(session_key=key + 1)
        assert not self.end(peer, name)
        assert not lease.handle.session.closed

    def test_rows_of_a_former_session_of_his_number_dont_count(self, backend, peer, name):
        take(backend, name)
        other = take(backend, f"{name}:other")
        HeldLock.objects.using(ALIAS).filter(name=other.name).update(
            session_started="2020-01-01T00:00Z"
        )
        expire(name)
        assert self.end(peer, name)


@POSTGRES
class TestAPauseLongerThanTheTimeout:
    """The process is stopped after a deadline was computed, and before it is used."""

    @pytest.fixture
    def pause(self, backend, monkeypatch):
        """Stop the caller once, after its request was sent."""
        paused = [0.0]
        submit = backend._home.submit
        monkeypatch.setattr(postgres_home, "clock", lambda: clock() + paused[0])

        def pause(until):
            def submit_and_stop(job, **terms):
                monkeypatch.setattr(backend._home, "submit", submit)
                submit(job, **terms)
                until(job)
                paused[0] += 60

            monkeypatch.setattr(backend._home, "submit", submit_and_stop)

        return pause

    def test_a_lock_that_was_granted_meanwhile_is_held(self, backend, name, pause):
        take(backend, f"{name}:first")
        pause(until=lambda job: wait_until(lambda: job._done, "the answer"))
        lease = take(backend, name)
        assert backend.verify(lease)
        pause(until=lambda job: wait_until(lambda: job._done, "the answer"))
        assert backend.release(lease)

    def test_a_request_without_an_answer_leaves_no_lock_behind(self, backend, peer, name, pause):
        lease = take(backend, f"{name}:first")
        go_on = threading.Event()
        backend._home.do(lambda: go_on.wait(20))
        pause(until=lambda job: None)
        with pytest.raises(BackendUnavailable, match="no answer within 5 s"):
            take(backend, name)
        pause(until=lambda job: None)
        with pytest.raises(BackendUnavailable, match="no answer within 5 s"):
            backend.release(lease)
        go_on.set()
        # A release that was sent is carried out.
        wait_until(lambda: not backend._home.held, "the release")
        assert take(peer, name)
        assert take(peer, f"{name}:first")


@POSTGRES
@pytest.mark.parametrize(
    "other", [{"owner": "another"}, {"session_key": 1}, {"session_started": "2020-01-01T00:00Z"}]
)
def test_whose_session_has_a_lock_is_told_by_all_of_his_row(backend, peer, name, other):
    """The session of a dead holder is ended by it, and that of nobody else."""
    lease = take(backend, name)
    given = {"name": name, "owner": lease.owner_id}
    pid = lease.handle.session.pid
    HeldLock.objects.using(ALIAS).filter(name=name).update(**other)
    assert peer._look(name, statements.END_ORPHAN, given) == []
    if "session_started" not in other:
        assert peer._look(name, statements.EVICT, given)[0][0] is None
    assert backend._home.ask(lambda: backend._home.session().pid) == pid


@POSTGRES
def test_a_refused_try_locks_no_row(backend, peer, name):
    lease = take(backend, name)
    peer._home.ask(lambda: peer._home.session().raw.execute("BEGIN"))
    assert peer.acquire(request_for(name)) is None
    assert backend.renew([lease]) == [Renewal.KEPT]


@POSTGRES
def test_a_holder_is_told_by_the_row_of_his_own_session_alone(backend, peer, name):
    lease = take(backend, name)
    assert peer.holder(name).owner == peer.holders([name])[name].owner == lease.owner_id
    HeldLock.objects.using(ALIAS).filter(name=name).update(session_pid=1)
    assert peer.holder(name).owner == peer.holders([name])[name].owner == ""
