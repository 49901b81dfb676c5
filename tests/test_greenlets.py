"""Under gevent, in processes of their own: patching is for good."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres"])


@pytest.fixture
def run_green(child_environment):
    def run(body, database):
        script = f"""
            from gevent import monkey
            monkey.patch_all()
            import django, gevent, time
            from django.conf import settings
            django.setup()
            settings.FENCEDLOCK = {{"default": {{"FENCE_DATABASE": {database!r}}}}}
            from django_fencedlock import LockNotAcquired, current_lease, lock
        """
        code = textwrap.dedent(script) + textwrap.dedent(body)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr

    return run


@pytest.mark.parametrize("database", ["default", "postgres"])
def test_leases_are_renewed_while_a_greenlet_leaves_no_room_to_others(run_green, database):
    run_green(
        """
        with lock("x", ttl=1) as lease:
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                pass  # the hub never gets a turn
            lease.check()
            assert lease.verify()
        """,
        database,
    )


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
        gevent.sleep(0.3)
        assert lock("x").acquire(blocking=False).release()
        """,
        "postgres",
    )
