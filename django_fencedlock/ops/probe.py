"""A lock that is taken, kept, handed over and given back, to see whether its service works."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, cast

from .. import conf
from ..backends.base import Backend, Grant, Renewal, Request
from ..conf import AliasConfig, Problem
from ..core.identity import new_owner
from ..core.runtime import clock
from ..exceptions import BackendUnavailable, FencedLockError
from ..findings import Finding, Level, error, note, ok, warning
from ..lease import Lease
from ..storage.text import for_shell

T = TypeVar("T")

#: The probe's name. The same each time, for its fence is never deleted.
NAME = "django_fencedlock.doctor:{alias}"
#: Seconds that the lock lasts, should the doctor die: nobody renews it.
TTL = 10.0
#: Seconds for which the lock is asked for, should another doctor have it.
ANOTHER_DOCTOR = 5.0
#: Seconds for the second owner to get into line, and to be served.
LINING_UP, SERVED = 0.1, 5.0
#: The problem of a service that can't be reached. To wait for it once more would tell no more.
UNREACHABLE = "E013"
#: How often a round trip is measured, and what is slow, in seconds.
ROUNDS, SLOW = 7, 0.1


_LEVELS = {"E": Level.ERROR, "W": Level.WARNING, "I": Level.NOTE}


def of_problems(problems: Iterable[Problem]) -> Iterator[Finding]:
    """Return system checks' problems as findings of the doctor."""
    for problem in problems:
        yield Finding(_LEVELS[problem.id[0]], f"{problem.id}: {problem.message}", problem.hint)


class _TooLong(Exception):
    """The time for this alias is over."""


class _Broken(Exception):
    """The service did what it must not; the rest would tell nothing."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.finding = error(what, remedy)


_NOT_EXCLUSIVE = (
    "Don't rely on this alias. Look for a proxy or a pooler in between, and for two servers behind "
    "one address."
)


def examine(config: AliasConfig, until: float) -> Iterator[Finding]:
    """Try one alias; ends soon after `until`, on the clock of leases."""
    probe = Probe(config, until)
    try:
        yield from probe.findings()
    except _Broken as exc:
        yield exc.finding
    except BackendUnavailable as exc:
        yield error(str(exc), "Start the service, or mend the settings of the alias.")
    except FencedLockError as exc:
        yield error(f"{type(exc).__name__}: {exc}", "See the message.")
    except _TooLong:
        yield error(
            "the examination took too long and was given up",
            "The service answers, and slowly: look at its load and the network. --timeout gives "
            "it more time.",
        )
    finally:
        probe.close()


class Probe:
    """Two owners with a backend each, as if they were two processes."""

    def __init__(self, config: AliasConfig, until: float) -> None:
        self._config = config
        self._until = until
        self._name = NAME.format(alias=config.alias)
        make: Callable[[AliasConfig], Backend] = conf.backend_class(config.backend)
        self._first, self._second = make(config), make(_apart(config))
        self._leases: list[tuple[Backend, Lease]] = []

    def findings(self) -> Iterator[Finding]:
        problems = self._timed(lambda: list(self._first.live_problems()))[0]
        yield from of_problems(problems)
        if any(problem.id == UNREACHABLE for problem in problems):
            return
        yield from self._timed(lambda: list(self._first.diagnose()))[0]
        yield self._round_trip()
        one = self._take()
        if one is None:
            yield self._another_doctor()
            return
        first, seconds = one
        yield ok(f"takes a lock: {_ms(seconds)}, token {first.token}")
        yield from self._holding(first)
        yield from self._handing_over(first)

    def close(self) -> None:
        """Leave nothing behind but the fence of the probe's name."""
        for backend, lease in self._leases:
            with contextlib.suppress(FencedLockError):
                backend.release(lease)
        for backend in (self._first, self._second):
            with contextlib.suppress(FencedLockError):
                backend.tidy()
                backend.close()

    # The steps

    def _round_trip(self) -> Finding:
        times = [self._timed(lambda: self._first.is_free(self._name))[1] for _ in range(ROUNDS)]
        typical = statistics.median(times)
        what = f"round trip {_ms(typical)} (slowest of {ROUNDS}: {_ms(max(times))})"
        if typical < SLOW:
            return ok(what)
        return warning(what, "Move the lock service nearer, or look at its load.")

    def _take(self) -> tuple[Lease, float] | None:
        until = clock() + ANOTHER_DOCTOR
        while True:
            request = self._request()
            grant, seconds = self._timed(lambda: self._first.acquire(request))  # noqa: B023
            if grant is not None:
                return self._lease(self._first, request, grant), seconds
            if clock() >= until:
                return None
            time.sleep(0.1)

    def _another_doctor(self) -> Finding:
        holder = self._first.holder(self._name)
        return warning(
            f"the probe's lock {self._name!r} is held by {holder or 'somebody'}",
            "Another doctor may be at work. Try again in a while.",
        )

    def _holding(self, lease: Lease) -> Iterator[Finding]:
        request = self._request()
        stolen = self._timed(lambda: self._second.acquire(request))[0]
        if stolen is not None:
            self._lease(self._second, request, stolen)
            raise _Broken(
                f"two owners were granted one lock (tokens {lease.token} and {stolen.token})",
                _NOT_EXCLUSIVE,
            )
        yield ok("refuses a second owner")
        if not self._timed(lambda: self._first.verify(lease))[0]:
            raise _Broken("the service doesn't know the owner that it granted to", _NOT_EXCLUSIVE)
        since = clock()
        (answer,), seconds = self._timed(lambda: self._first.renew([lease]))
        if answer is not Renewal.KEPT:
            raise _Broken(f"a renewal was answered: {answer.value}", _NOT_EXCLUSIVE)
        lease.extend_from(since)
        yield ok(f"verifies and renews: {_ms(seconds)}")

    def _handing_over(self, first: Lease) -> Iterator[Finding]:
        second, seconds = self._hand_over(first)
        if second.token <= first.token:
            raise _Broken(
                f"the second owner got token {second.token} after {first.token}: tokens must rise",
                "Restore the fences: see docs/restore.md.",
            )
        how = "to one who waits" if self._first.supports_waiting else "to the next one who asks"
        yield ok(f"hands over {how}: {_ms(seconds)}, token {second.token}")
        if self._timed(lambda: self._first.verify(first))[0] or (
            self._timed(lambda: self._first.renew([first]))[0] == [Renewal.KEPT]
        ):
            raise _Broken("the former owner still passes for the holder", _NOT_EXCLUSIVE)
        released, seconds = self._timed(lambda: self._second.release(second))
        self._leases.clear()
        if not released or self._timed(lambda: self._second.holder(self._name))[0]:
            raise _Broken("the lock isn't free after its release", _NOT_EXCLUSIVE)
        yield ok(f"refuses the former owner, and gives back: {_ms(seconds)}")
        if not self._first.supports_waiting:
            yield note("whoever waits looks again and again: there is no order of arrival")

    def _hand_over(self, first: Lease) -> tuple[Lease, float]:
        request = self._request()
        if not self._first.supports_waiting:
            began = clock()
            self._timed(lambda: self._first.release(first))
            grant = self._timed(lambda: self._second.acquire(request))[0]
            return self._served(request, grant), clock() - began
        waiter = _Waiter(self._second, request)
        # Long enough to be in line; if it isn't, it is served all the same.
        time.sleep(LINING_UP)
        began = clock()
        self._timed(lambda: self._first.release(first))
        grant, at = waiter.result()
        return self._served(request, grant), at - began

    def _served(self, request: Request, grant: Grant | None) -> Lease:
        if grant is None:
            raise _Broken(
                "the lock was given back, and the next owner didn't get it",
                "Look for an open transaction that has the fence locked: manage.py fencedlock "
                f"show {for_shell(self._name)}",
            )
        return self._lease(self._second, request, grant)

    # Tools

    def _request(self) -> Request:
        owner = replace(new_owner(), thread="doctor")
        return Request(name=self._name, owner=owner, ttl=TTL)

    def _lease(self, backend: Backend, request: Request, grant: Grant) -> Lease:
        lease = Lease(
            name=request.name,
            alias=self._config.alias,
            owner=request.owner,
            token=grant.token,
            ttl=request.ttl,
            since=grant.since,
            # Nobody but the backend is asked to do anything with it.
            control=cast(Any, None),
            database=self._config.fence_database,
            handle=grant.handle,
        )
        self._leases.append((backend, lease))
        return lease

    def _timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """Do a step, each of which the backend itself bounds, unless the time is over."""
        began = clock()
        if began > self._until:
            raise _TooLong
        return work(), clock() - began


def _apart(config: AliasConfig) -> AliasConfig:
    """The same settings, for a backend that shares no session with those of this process."""
    if "TIMEOUT" not in conf.backend_class(config.backend).option_names:
        return config
    # Sessions are shared by those who give them the same time, and one session's locks are
    # refused to it by this process and not by the server.
    return replace(config, options={**config.options, "TIMEOUT": config.timeout + 0.001})


class _Waiter:
    """The second owner, who waits in a thread."""

    def __init__(self, backend: Backend, request: Request) -> None:
        self._backend = backend
        self._request = request
        self._grant: Grant | None = None
        self._error: Exception | None = None
        self._at = 0.0
        self._thread = threading.Thread(target=self._wait, name="fencedlock-doctor", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._grant = self._backend.wait(self._request, SERVED)
        except Exception as exc:
            self._error = exc
        self._at = clock()

    def result(self) -> tuple[Grant | None, float]:
        """The grant, and when it came."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._grant, self._at


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
