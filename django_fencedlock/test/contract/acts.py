"""Functions that tests call in other threads and processes."""

from __future__ import annotations

import ast
import contextlib
import os
import random
import select
import signal
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.db import connections

from ...core.identity import Process, this_process
from ...lease import Lease, current_lease
from ...lock_sets import lock_all
from ...locks import lock
from ..processes import TIMEOUT, wait_until

#: Seconds for a lease that doesn't expire during a test.
LONG = 60.0


def try_to_take(alias: str, name: str, limit: int | None = None, path: bool = False) -> bool:
    lease = lock(name, ttl=LONG, backend=alias, limit=limit, path=path).acquire(blocking=False)
    return lease is not None and lease.release()


def hammer(alias: str, name: str, threads: int, seconds: float) -> tuple[int, int]:
    """Try repeatedly to acquire the lock; return the tries and grants."""
    until = time.monotonic() + seconds

    def hammer_once() -> list[bool]:
        taken = []
        while time.monotonic() < until:
            taken.append(try_to_take(alias, name))
            # Without a pause, the threads leave no CPU to the process that renews.
            time.sleep(0.001)
        connections.close_all()
        return taken

    with ThreadPoolExecutor(threads) as executor:
        done = [executor.submit(hammer_once) for _ in range(threads)]
    taken = [each for thread in done for each in thread.result()]
    return len(taken), sum(taken)


_held: dict[str, Lease] = {}


def hold(
    alias: str,
    name: str,
    wait: float = 0.0,
    ttl: float = LONG,
    fenced: bool = True,
    shared: bool = False,
    limit: int | None = None,
    path: bool = False,
) -> int:
    kind: dict[str, Any] = {"shared": shared, "limit": limit, "path": path}
    asked = lock(name, ttl=ttl, backend=alias, fenced=fenced, **kind)
    lease = asked.acquire(blocking_timeout=wait)
    assert lease is not None, f"Lock {name!r} isn't free."
    _held[name] = lease
    return lease.token if fenced else 0


def held_by(name: str) -> str:
    return _held[name].owner_id


def who() -> Process:
    return this_process()


def renew(name: str) -> None:
    _held[name].renew()


def write_fenced(name: str) -> None:
    """Commit a transaction under the lease; it raises if a newer grant exists."""
    with _held[name].atomic():
        pass


def let_go(name: str) -> bool:
    return _held.pop(name).release()


def wait_for_the_loss(name: str) -> None:
    wait_until(lambda: _held[name].lost, f"the lease of {name!r} to be lost")


def take_turns(alias: str, name: str, times: int, log: str, limit: int | None = None) -> None:
    for _ in range(times):
        with lock(name, ttl=LONG, backend=alias, blocking_timeout=TIMEOUT, limit=limit) as lease:
            _note(log, f"in {lease.token}")
            if limit:
                time.sleep(random.uniform(0, 0.01))
            _note(log, f"out {lease.token}")


def read_and_write(alias: str, name: str, times: int, log: str) -> None:
    """Acquire the lock, mostly as a reader; note each grant, its kind and its token."""
    for _ in range(times):
        shared = random.random() < 0.7
        with lock(name, ttl=LONG, backend=alias, blocking_timeout=TIMEOUT, shared=shared) as lease:
            kind = "reader" if shared else "writer"
            _note(log, f"in {kind} {lease.token}")
            _note(log, f"out {kind} {lease.token}")


def take_random_paths(alias: str, root: str, times: int, log: str) -> None:
    """Acquire random paths of a tree of 13 names in three levels; note each with its tokens."""
    for _ in range(times):
        parts = [root, *(str(random.randint(1, 3)) for _ in range(random.choice((0, 1, 2, 2))))]
        path = "/".join(parts)
        with lock(path, ttl=LONG, backend=alias, blocking_timeout=TIMEOUT, path=True) as lease:
            _note(log, f"in {path} {lease.token}")
            with lease.atomic():
                time.sleep(random.uniform(0, 0.005))
            _note(log, f"out {path} {lease.token}")


def note_when_served(alias: str, name: str, place: int, log: str) -> None:
    with lock(name, ttl=LONG, backend=alias, blocking_timeout=TIMEOUT):
        _note(log, str(place))


def hold_all(alias: str, names: list[str], wait: float = 0.0) -> list[int]:
    leases = lock_all(names, ttl=LONG, backend=alias).acquire(blocking_timeout=wait)
    assert leases is not None, f"One of {names} isn't free."
    _held.update(leases)
    return [lease.token for lease in leases.values()]


def try_to_take_all(alias: str, names: list[str]) -> bool:
    leases = lock_all(names, ttl=LONG, backend=alias).acquire(blocking=False)
    return leases is not None and leases.release()


def take_pairs(alias: str, names: list[str], threads: int, times: int, log: str) -> None:
    """Acquire random pairs of names in several threads, in any order."""

    def take() -> None:
        for _ in range(times):
            pair = random.sample(names, 2)
            with lock_all(pair, ttl=LONG, backend=alias, blocking_timeout=TIMEOUT) as leases:
                for name, lease in leases.items():
                    _note(log, f"{name} in {lease.token}")
                for name, lease in leases.items():
                    _note(log, f"{name} out {lease.token}")
        connections.close_all()

    with ThreadPoolExecutor(threads) as executor:
        for done in [executor.submit(take) for _ in range(threads)]:
            done.result(2 * TIMEOUT)


def take_pairs_in_children(
    alias: str, names: list[str], children: int, times: int, log: str, kills: int = 0
) -> list[int]:
    """
    Acquire random pairs of names in forked children; return their exit codes.

    Some are killed at random moments. Forked ones start at once, and do as if they were new.
    """
    running = [_fork(lambda: take_pairs(alias, names, 1, times, log)) for _ in range(children)]
    for child in random.sample(running, kills):
        time.sleep(random.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in running]


def _fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        # A deadlock must end the test, and not outlive it.
        signal.alarm(int(2 * TIMEOUT))
        # Each would draw the same pairs.
        random.seed()
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _note(log: str, line: str) -> None:
    with open(log, "a") as file:
        file.write(f"{line}\n")


def fork_while_holding(alias: str, name: str) -> dict[str, Any]:
    """Fork while holding the lock; return what the child and this process saw."""
    lease = lock(name, ttl=LONG, backend=alias).acquire(blocking=False)
    assert lease is not None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_child(alias, name, lease, writing)
    os.close(writing)
    try:
        seen = _read_line(reading)
        seen["parent verified"] = lease.verify()
        seen["parent token"] = lease.token
        time.sleep(0.2)
        seen["waited"] = not select.select([reading], [], [], 0)[0]
        lease.release()
        return {**seen, **_read_line(reading)}
    finally:
        os.close(reading)
        _end(child)


def _be_the_child(alias: str, name: str, lease: Lease, writing: int) -> None:
    try:
        again = lock(name, ttl=LONG, backend=alias)
        seen = {
            "inherited": current_lease(name),
            "lost": lease.lost,
            "verified": lease.verify(),
            "released": lease.release(),
            "taken": again.acquire(blocking=False) is not None,
        }
        os.write(writing, f"{seen!r}\n".encode())
        with lock(name, ttl=LONG, backend=alias, blocking_timeout=TIMEOUT) as own:
            token = own.token
        os.write(writing, f"{ {'token': token}!r}\n".encode())
    except BaseException as exc:
        os.write(writing, f"{ {'error': repr(exc)}!r}\n".encode())
    finally:
        os._exit(0)


def _read_line(reading: int) -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        assert select.select([reading], [], [], TIMEOUT)[0], "The child sent nothing."
        read = os.read(reading, 1)
        assert read, "The child died."
        line += read
    seen: dict[str, Any] = ast.literal_eval(line.decode())
    assert "error" not in seen, seen
    return seen


def _end(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def why_lost(name: str) -> str:
    lease = _held[name]
    # The notifier does this too, shortly after the loss.
    lease.explain()
    return str(lease.loss())
