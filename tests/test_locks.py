"""`lock()` and what it returns: blocks, decorators, and the messages for typical mistakes."""

import asyncio
import contextlib
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from asgiref.sync import sync_to_async
from celery import Task, shared_task
from django.core.exceptions import SynchronousOnlyOperation

import django_fencedlock
from django_fencedlock import (
    AliasConflict,
    BackendUnavailable,
    LockNotAcquired,
    NotTheHolder,
    current_lease,
    exceptions,
    lock,
)
from django_fencedlock.core import runtime
from django_fencedlock.core.manager import service
from django_fencedlock.locks import Lock
from django_fencedlock.test import assert_not_locked, hold_lock
from tests.failing import raising, unavailable
from tests.servers.process import wait_until
from tests.threads import elsewhere

pytestmark = pytest.mark.django_db(transaction=True)


def f():
    pass


def of_user(self, user_id, *args, **kwargs):
    pass


#: Django 6 alone has the real one: see test_django_tasks.py.
FakeTask = type("Task", (), {"__module__": "django.tasks.base"})


def in_coroutine(function):
    async def main():
        return function()

    return asyncio.run(main())


def order(task):
    return (
        f"TypeError: Put @lock('x') below @{task}, directly above the function:\n"
        f"    @{task}\n    @lock('x')\n    def my_task(...):"
    )


class OfClass(Task):
    pass


async def acoro():
    pytest.fail("called")


async def agen():
    yield


class Called:
    async def __call__(self):
        pytest.fail("called")


def passes_on(function):
    def wrapper():
        return function()

    return wrapper


def after_the_lock(what):
    return (
        f"TypeError: @lock can't wrap wrapper(): it returned {what}, which would run after the "
        "lock was released. Put @lock directly above its `async def`, or acquire the lock inside "
        "of it."
    )


#: What users try, and the error.
MISTAKES = [
    (
        lambda: lock("x", timeout=3),
        "TypeError: lock() has no argument timeout. Use ttl= (when the lock expires) or "
        "blocking_timeout= (how long to wait).",
    ),
    (
        lambda: lock("x").acquire(timeout=3),
        "TypeError: acquire() has no argument timeout. Use ttl= of lock() (when the lock expires) "
        "or blocking_timeout= (how long to wait).",
    ),
    (
        lambda: lock("x").acquire(ttl=3),
        "TypeError: acquire() has no argument ttl. Use ttl= of lock() (when the lock expires) or "
        "blocking_timeout= (how long to wait).",
    ),
    (
        lambda: lock("x").acquire(blockng=False),
        "TypeError: acquire() has no argument blockng. Did you mean 'blocking'? "
        "Known keys: blocking, blocking_timeout, cancel.",
    ),
    (
        lambda: lock(pk=1),
        'TypeError: lock() has no argument pk. Write a name, as in lock("invoice:42"), or '
        "Invoice.fencing.lock(pk=42).",
    ),
    (
        lambda: lock("x", 5),
        "TypeError: lock() takes its name alone by position. Write ttl=5 or blocking_timeout=5.",
    ),
    (lambda: lock(), 'TypeError: Use @lock("name"), with a name, such as @lock("name").'),
    (
        lambda: lock("f:user_id")(of_user),
        "TypeError: Lock name 'f:user_id' has no braces, so all calls of of_user() share one lock. "
        'Write "f:{user_id}", or rename it.',
    ),
    (
        lambda: lock("user_id")(of_user),
        "TypeError: Lock name 'user_id' has no braces, so all calls of of_user() share one lock. "
        'Write "{user_id}", or rename it.',
    ),
    (
        lambda: lock("x", blocking=False),
        "TypeError: lock() has no argument blocking. Use blocking_timeout=0, or "
        "lock(...).acquire(blocking=False).",
    ),
    (
        lambda: lock("x", tl=3),
        "TypeError: lock() has no argument tl. Did you mean 'ttl'? "
        "Known keys: backend, blocking_timeout, fenced, limit, required, shared, ttl.",
    ),
    (
        lambda: lock("x").release(),
        "AttributeError: 'Lock' object has no attribute 'release'; its lease has: "
        "`lease = lock('x').acquire()`, then `lease.release()`.",
    ),
    (
        lambda: lock("x").token,
        "AttributeError: 'Lock' object has no attribute 'token'; its lease has: "
        "`lease = lock('x').acquire()`, then `lease.token`.",
    ),
    (
        lambda: lock("x").locked(),
        "AttributeError: 'Lock' object has no attribute 'locked'. "
        "Use lock('x').holder(): it is None if the lock is free.",
    ),
    (lambda: lock("x").foo, "AttributeError: 'Lock' object has no attribute 'foo'"),
    (lambda: lock(f), 'TypeError: Use @lock("name"), with a name, such as @lock("f").'),
    (lambda: lock(OfClass), 'TypeError: Use @lock("name"), with a name, such as @lock("name").'),
    (
        lambda: lock(shared_task(f)),
        'TypeError: Use @lock("name"), with a name, such as @lock("name").',
    ),
    (lambda: lock("x")(shared_task(f)), order("shared_task")),
    (lambda: lock("x")(OfClass()), order("shared_task")),
    (lambda: lock("x")(FakeTask()), order("task")),
    (
        lambda: lock("x")(OfClass),
        "TypeError: @lock('x') decorates functions, not the class OfClass: its methods would run "
        "without the lock. Decorate them, such as run() of a task.",
    ),
    (
        lambda: lock("x", required=False)(f),
        "TypeError: @lock(required=False) would run f() without the lock. Remove required=False, "
        "or write in f(): with lock('x', required=False) as lease.",
    ),
    (
        lambda: lock("x")(agen),
        "TypeError: @lock can't wrap the generator agen(): its body would run after the lock was "
        "released. Acquire the lock inside of it.",
    ),
    (lambda: lock("x")(passes_on(acoro))(), after_the_lock("a coroutine")),
    (lambda: lock("x")(passes_on(Called()))(), after_the_lock("a coroutine")),
    (lambda: lock("x")(passes_on(lambda: (n for n in ())))(), after_the_lock("a generator")),
    (lambda: lock("x")(passes_on(agen))(), after_the_lock("an async_generator")),
    (lambda: lock("x")(passes_on(sync_to_async(f)))(), after_the_lock("a coroutine")),
    (
        lambda: lock("x").acquire(blocking=False, blocking_timeout=3),
        "ValueError: Use either blocking=False or blocking_timeout=, not both.",
    ),
    (
        lambda: lock("x").acquire(cancel=True),
        "TypeError: cancel is True; it has to be a threading.Event.",
    ),
    (
        lambda: in_coroutine(lock("x").__enter__),
        "SynchronousOnlyOperation: lock('x') would block the event loop; "
        "write `async with lock('x')`.",
    ),
    (
        lambda: in_coroutine(lock("x").holder),
        "SynchronousOnlyOperation: lock('x') would block the event loop; "
        "write `await lock('x').aholder()`.",
    ),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_the_error_says_what_to_write_instead(mistake, message):
    error, _, text = message.partition(": ")
    with pytest.raises((TypeError, ValueError, AttributeError, SynchronousOnlyOperation)) as caught:
        mistake()
    assert (type(caught.value).__name__, str(caught.value)) == (error, text)
    assert len(text) <= 200
    assert lock("x").holder() is None


@pytest.mark.parametrize("name", ["self", "args", "f:user", "{user_id}:user_id", "x:{{user_id}}"])
def test_a_name_that_needs_no_braces_is_allowed(name):
    assert lock(name)(of_user)


def test_a_function_under_sync_to_async_is_decorated_as_a_coroutine_function():
    @lock("x")
    @sync_to_async
    def token():
        return current_lease("x").token

    assert asyncio.run(token()) == 1
    assert_not_locked("x")


def test_an_object_whose_init_failed_has_a_repr():
    assert repr(Lock.__new__(Lock)) == "lock('', backend='')"
    with pytest.raises(AttributeError, match="has no attribute 'foo'"):
        Lock.__new__(Lock).foo  # noqa: B018


@pytest.mark.parametrize("method", ["verify", "renew", "release"])
def test_a_lease_does_not_block_an_event_loop(method):
    async def main():
        async with lock("x") as lease:
            message = rf"lease\.{method}\(\) would .*; write `await lease\.a{method}\(\)`\."
            with pytest.raises(SynchronousOnlyOperation, match=message):
                getattr(lease, method)()
            await getattr(lease, f"a{method}")()

    asyncio.run(main())


def test_a_plain_block_of_a_lease_in_a_coroutine_is_refused_and_holds_nothing():
    async def main():
        refused = pytest.raises(SynchronousOnlyOperation, match="write `async with lease`")
        with refused, await lock("x").aacquire():
            pytest.fail("entered")
        while await lock("x").aholder():
            await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_closed_generator_whose_lease_was_released_before_releases_nothing(monkeypatch):
    def rows():
        with lock("x").acquire() as lease:
            lease.release()
            yield

    begun = elsewhere(lambda: next(made := rows()) or made)
    started = []
    monkeypatch.setattr(runtime, "start", started.append)
    begun.close()
    assert started == []


def test_a_block_without_a_lease_holds_nothing():
    with hold_lock("x") as held:
        with pytest.raises(TypeError), lock("x").acquire(blocking=False):
            pytest.fail("entered")
        assert lock("x").holder().owner_id == held.owner_id


@pytest.mark.parametrize("of", ["a block", "current_lease()", "a block of the lease"])
def test_a_lease_that_other_code_releases_is_not_released_by_a_block(of):
    with lock("x").acquire() if of == "a block of the lease" else lock("x") as lease:
        refused = pytest.raises(RuntimeError, match=r"too early\. Remove `with lease`, or write `w")
        with refused, current_lease("x") if of == "current_lease()" else lease:
            pytest.fail("entered")
        assert lease.verify()
        with lock("x"):
            pass
        assert lease.verify()
    assert lock("x").holder() is None


def test_another_thread_may_not_begin_a_block_of_a_lease():
    lease = lock("x").acquire()
    for begin in (lease.__enter__, lambda: asyncio.run(lease.__aenter__()), lease.release):
        with pytest.raises(NotTheHolder, match="acquired by another thread"):
            elsewhere(begin)
    with lease:
        assert lease.verify()


def test_a_coroutine_waits_for_the_end_of_the_call_that_acquired_its_lease():
    """Without blocking the event loop, which ends the call."""

    async def main():
        acquired, end = [], threading.Event()

        def call():
            acquired.append(lock("x").acquire())
            end.wait(10)

        running = asyncio.create_task(asyncio.to_thread(call))
        while not acquired:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.05, end.set)
        async with acquired[0] as lease:
            assert await lease.averify()
        await running

    asyncio.run(main())
    assert_not_locked("x")


def test_an_interrupt_of_acquire_takes_its_count_back(monkeypatch):
    """Else a block of the lease would release the lock of the outer block."""

    def interrupted(lease, key, value):
        object.__setattr__(lease, key, value)
        if key == "to_release" and value:
            raise KeyboardInterrupt

    with lock("x") as lease:
        with monkeypatch.context() as patch:
            patch.setattr(type(lease), "__setattr__", interrupted)
            with pytest.raises(KeyboardInterrupt):
                lock("x").acquire()
        assert (lease.entries, lease.to_release) == (1, 0)
        with pytest.raises(RuntimeError, match="too early"):
            lease.__enter__()


def test_a_failed_release_at_the_end_of_a_block_of_a_lease_is_logged(caplog, monkeypatch):
    async def main():
        async with await lock("y").aacquire():
            pass

    with lock("x").acquire():
        monkeypatch.setattr(service("default").backend, "release", unavailable)
    asyncio.run(main())
    assert [record.lock_name for record in caplog.records] == ["x", "y"]
    assert {record.lock_reason for record in caplog.records} == {"no answer"}


class TestALockThatIsNotRequired:
    def test_gives_none_in_one_thread_and_the_lease_in_another(self):
        """One object serves both, and each leaves its own block, in any order."""
        wanted = lock("x", blocking_timeout=0, required=False)
        with ThreadPoolExecutor(1) as other:
            for first in ("holder", "refused"):
                lease = wanted.__enter__()
                assert other.submit(wanted.__enter__).result() is None
                if first == "holder":
                    wanted.__exit__(None, None, None)
                    assert lock("x").holder() is None
                assert other.submit(wanted.__exit__, None, None, None).result() is None
                if first == "refused":
                    assert lease.verify()
                    wanted.__exit__(None, None, None)
                assert lock("x").holder() is None
                assert wanted._entered == []

    def test_is_not_released_by_the_block_of_an_ended_holder_without_it(self):
        wanted = lock("x", blocking_timeout=0, required=False)
        with lock("x").acquire():
            assert elsewhere(wanted.__enter__) is None
        lease = elsewhere(wanted.__enter__)
        # It isn't known which block this code leaves. The first is the one without the lock.
        wanted.__exit__(None, None, None)
        assert lock("x").holder().owner_id == lease.owner_id
        wanted.__exit__(None, None, None)
        assert lock("x").holder() is None

    @pytest.mark.parametrize("way", ["with", "ExitStack"])
    @pytest.mark.parametrize("has_lock", [True, False])
    def test_a_generator_that_other_code_closes_leaves_its_own_block(self, has_lock, way):
        """The thread that runs the garbage collector may be in a block of the same object."""
        wanted = lock("x", blocking_timeout=0, required=False)

        def rows():
            if way == "with":
                with wanted as lease:
                    yield lease
            with contextlib.ExitStack() as stack:
                yield stack.enter_context(wanted)

        with ThreadPoolExecutor(1) as other, contextlib.ExitStack() as mine:
            begun = rows()
            if has_lock:
                assert other.submit(next, begun).result()
            lease = mine.enter_context(wanted)
            if not has_lock:
                assert other.submit(next, begun).result() is None
            assert (lease is None) is has_lock
            begun.close()
            if has_lock:
                wait_until(lambda: lock("x").holder() is None, "a free lock")
            else:
                assert lease.verify()
        assert wanted._entered == []
        assert_not_locked("x")

    def test_an_async_generator_that_another_task_closes_leaves_its_own_block(self):
        wanted = lock("x", blocking_timeout=0, required=False)

        async def rows():
            async with wanted as lease:
                yield lease

        async def close(begun):
            async with wanted as lease:
                assert lease is None
                await begun.aclose()

        async def main():
            begun = rows()
            assert await anext(begun)
            await asyncio.create_task(close(begun))
            while await lock("x").aholder():
                await asyncio.sleep(0.01)

        asyncio.run(main())
        assert wanted._entered == []

    @pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
    @pytest.mark.usefixtures("backend")
    def test_gives_none_if_the_code_that_waits_for_this_call_has_the_lock(self):
        @sync_to_async
        def call():
            with lock("x", required=False) as lease:
                return lease

        async def main():
            async with lock("x") as lease:
                assert await call() is None
                assert await lease.averify()

        asyncio.run(main())

    def test_does_not_hide_the_refusal_of_an_inner_lock(self):
        outer, inner = lock("outer", required=False), lock("inner", blocking_timeout=0)
        refused = pytest.raises(LockNotAcquired, match="'inner' is held")
        with hold_lock("inner"), refused, outer as lease, inner:
            pytest.fail("entered")
        assert lease.released
        assert lock("outer").holder() is None

    @pytest.mark.parametrize("error", [BackendUnavailable, AliasConflict])
    def test_raises_what_is_no_refusal(self, monkeypatch, error):
        failing = raising(error("failed", name="x", alias="default"))
        monkeypatch.setattr(service("default").backend, "acquire", failing)
        wanted = lock("x", required=False)
        with pytest.raises(error), wanted:
            pytest.fail("entered")
        with pytest.raises(error):
            asyncio.run(wanted.__aenter__())
        assert wanted._entered == []


def test_every_error_is_at_the_top_level():
    found = {name for name, each in vars(exceptions).items() if inspect.isclass(each)}
    assert {each for each in found if exceptions.__name__ in vars(exceptions)[each].__module__} < {
        *django_fencedlock.__all__
    }
