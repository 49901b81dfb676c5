"""Under gevent, in processes of their own: patching is for good."""

import re
import textwrap
from pathlib import Path

import pytest

from tests.scripts import run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True, databases=["default", "postgres"]),
]


GEVENT = """
    from gevent import monkey
    monkey.patch_all()
    import gevent
"""


@pytest.fixture
def run_green(child_environment):
    def run(body, database):
        script = f"""
            import django, time
            from django.conf import settings
            django.setup()
            settings.FENCEDLOCK = {{"default": {{"FENCE_DATABASE": {database!r}}}}}
            from django_fencedlock import LockNotAcquired, current_lease, lock
        """
        code = "".join(map(textwrap.dedent, (GEVENT, script, body)))
        run_python(code=code, env=child_environment())

    return run


@pytest.mark.parametrize("database", ["default", "postgres"])
def test_leases_are_renewed_while_a_greenlet_leaves_no_room_to_others(run_green, database):
    code = """
        with lock("x", ttl=5) as lease:
            end, beyond = time.monotonic() + 60, lease.deadline + 5
            while lease.deadline < beyond and time.monotonic() < end:
                pass  # the hub never gets a turn
            assert lease.deadline >= beyond
            lease.check()
            assert lease.verify()
    """
    run_green(code, database)


@pytest.mark.parametrize("database", ["default", "postgres"])
def test_each_greenlet_is_a_holder_of_its_own(run_green, database):
    run_green(
        """
        tokens = []

        def work():
            for _ in range(5):
                with lock("x", blocking_timeout=30) as lease:
                    assert current_lease() is lease
                    with lock("x") as again:
                        assert again is lease
                    gevent.sleep(0.001)
                    tokens.append(lease.token)

        with lock("x"):
            assert gevent.spawn(lambda: lock("x").acquire(blocking=False)).get() is None
        gevent.joinall([gevent.spawn(work) for _ in range(6)], raise_error=True)
        assert tokens == sorted(tokens) and len(set(tokens)) == 30
        """,
        database,
    )


def test_a_greenlet_killed_while_it_waits_leaves_nothing_held(run_green):
    run_green(
        """
        with lock("x"):
            waiter = gevent.spawn(lambda: lock("x", blocking_timeout=30).acquire())
            gevent.sleep(0.1)
            waiter.kill()
        assert lock("x", blocking_timeout=20).acquire().release()
        """,
        "postgres",
    )


def test_a_generator_of_a_greenlet_that_has_ended_releases_the_lock(run_green):
    run_green(
        """
        def rows():
            with lock("x"):
                yield

        def begin():
            begun.append(rows())
            next(begun[0])

        begun = []
        gevent.spawn(begin).get()
        # It was the last reference, as where the garbage collector comes along.
        begun.clear()
        end = time.monotonic() + 20
        while lock("x").holder() and time.monotonic() < end:
            gevent.sleep(0.01)
        assert not lock("x").holder()
        """,
        "postgres",
    )


def test_on_lost_abort_is_raise(run_green):
    """The body runs to its end, and the task fails with LeaseLost."""
    run_green(
        """
        from celery import Celery
        from django_fencedlock import LeaseLost
        from django_fencedlock.celery import single_instance

        @Celery(set_as_current=False).task
        @single_instance("x", on_lost="abort")
        def work():
            current_lease().mark_lost("removed")
            gevent.sleep(0.1)
            ended.append(True)

        ended = []
        try:
            work()
        except LeaseLost:
            assert ended
        else:
            raise AssertionError("the loss isn't reported")
        """,
        "default",
    )


def test_greenlets_take_turns_as_the_page_says(run_green):
    page = Path(__file__).resolve().parent.parent / "docs/guides/recipes.md"
    code = re.search(r"```python\n(import gevent\n.*?)```", page.read_text(), re.DOTALL)[1]
    run_green(f"{textwrap.dedent(code)}\nassert fetch_twice('news') == [1, 2]", "default")


def test_a_real_thread_and_a_greenlet_wait_for_each_others_connection(run_green):
    run_green(
        """
        from functools import partial
        from django_fencedlock.core import runtime
        from django_fencedlock.storage import connections as sessions

        sessions.MAX_CONNECTIONS = 1
        pool, done = sessions.ConnectionPool("default", timeout=30), []
        hold = partial(pool.run, lambda connection: time.sleep(0.3))
        wait = partial(pool.run, done.append)
        for start_first, start_second in (
            (runtime.start, gevent.spawn),
            (gevent.spawn, runtime.start),
        ):
            began = time.monotonic()
            done.clear()
            start_first(hold)
            gevent.sleep(0.1)
            start_second(wait)
            while not done and time.monotonic() < began + 20:
                gevent.sleep(0.01)
            assert done, f"{start_second} wasn't woken"
        """,
        "default",
    )
