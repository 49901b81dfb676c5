"""The keeper renews the leases of one alias in batches, and marks those that are lost."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from weakref import WeakKeyDictionary

from django.db import Error

from .. import logs
from ..backends.interface import Backend, Grant, Renewal
from ..exceptions import BackendUnavailable
from ..lease import Lease
from ..storage.fences import Fences
from . import runtime
from .events import Kind, emit
from .runtime import clock, notify

logger = logging.getLogger(__name__)

#: A lease is renewed so many times within its ttl.
BEATS = 3
#: Seconds from a release until its row of the registry is deleted.
CLEAR_AFTER = 1.0
#: Rows that wait to be deleted; those beyond it expire.
MAX_ROWS = 10_000
#: Seconds for which a doubt is kept, and until its first release; each pause is twice the last.
DOUBTED, FIRST_DOUBT = 60.0, 1.0
#: Doubts that are kept.
MAX_DOUBTS = 1000
#: Seconds for which the thread waits for new leases before it ends.
LINGER = 30.0

#: Why a lease is lost, unless more is known.
REFUSED = "the lock service refused to renew it: another holder had come"


class Keeper:
    """
    Renews every lease each third of its ttl.

    Its thread waits for the lock service of its alias alone, and runs no code of the user's:
    callbacks, signal receivers and log handlers run in the notifier's thread. A second thread
    renews the registry's rows and compares the fences, where the service doesn't. A third one
    releases doubts: acquires that raised, and releases that failed, by their owners' ids.

    A lease is lost when the service refuses it, or when its ttl is over and the last try to renew
    it failed. One that was held for its ``max_hold`` is renewed no more: it is lost when its ttl is
    over. `tick()` does all the work and may be driven without the thread.
    """

    def __init__(
        self,
        backend: Backend,
        report_losses: Callable[[Sequence[Lease]], object],
        clock: Callable[[], float] = clock,
        fences: Fences | None = None,
    ) -> None:
        self._backend = backend
        #: None for a backend that records grants itself.
        self._fences = fences
        #: Called from the notifier's thread with leases that were marked as lost.
        self._report_losses = report_losses
        self._clock = clock
        self._registry = runtime.Worker(f"fencedlock-registry-{backend.config.alias}")
        self._releaser = runtime.Worker(f"fencedlock-releaser-{backend.config.alias}")
        backend.lost = self.lose
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = runtime.allocate_lock()
        # Weak: a lease to which nothing else refers is released.
        self._due: WeakKeyDictionary[Lease, float] = WeakKeyDictionary()
        self._clear_at: float | None = None
        #: What the registry's thread is asked for: rows to renew, and rows to delete.
        self._renewed: WeakKeyDictionary[Lease, None] = WeakKeyDictionary()
        self._is_asked = False
        self._ended: deque[Grant] = deque(maxlen=MAX_ROWS)
        #: By owner id: the grant, when to release it again, and when it was noted.
        self.doubts: dict[str, tuple[Grant, float, float]] = {}
        self._batch: frozenset[Lease] = frozenset()
        self._batch_done = threading.Event()
        self._wake: runtime.SimpleQueue[None] = runtime.SimpleQueue()
        self._wakes_at = math.inf
        self._runs = False

    def after_fork(self) -> None:
        """Keep nothing of the parent's; the threads stayed there."""
        self._reset()

    def keep(self, lease: Lease) -> None:
        """Renew `lease` from now on."""
        with self._lock:
            self._due[lease] = due = self._due_after(lease)
            sleeps_too_long = not self._runs or due < self._wakes_at
        if sleeps_too_long:
            self._rouse(due)

    def drop(self, lease: Lease) -> None:
        """
        Renew `lease` no more.

        Waits for a batch that has it under way: a renewal that came to the service after the
        release would take the lock again.
        """
        with self._lock:
            self._due.pop(lease, None)
            done = self._batch_done if lease in self._batch else None
        if done is not None:
            done.wait()

    def clear_row(self, grant: Grant) -> None:
        """Delete a grant's row of the registry soon, from the registry's thread."""
        if self._fences is None or not grant.fenced:
            return
        self._ended.append(grant)
        if self._clear_at is not None:
            return
        self._clear_at = self._clock() + CLEAR_AFTER
        # If no thread can be started, the rows are deleted later; the lock is released.
        with contextlib.suppress(RuntimeError):
            self._rouse(self._clear_at)

    def doubt(self, grant: Grant) -> None:
        """Release `grant` again and again for a minute: the service may have it, or get it yet."""
        now = self._clock()
        with self._lock:
            if len(self.doubts) < MAX_DOUBTS:
                self.doubts[grant.owner] = grant, now + FIRST_DOUBT, now
        with contextlib.suppress(RuntimeError):
            self._rouse(now + FIRST_DOUBT)

    def clear(self) -> None:
        """Delete now the rows whose deletion was put off."""
        ended: list[Grant] = []
        while self._ended:
            ended.append(self._ended.popleft())
        if not ended or self._fences is None:
            return
        try:
            self._fences.clear(ended)
        except Error as exc:
            logger.warning(
                "Rows of alias %r weren't deleted: %s",
                self._backend.config.alias,
                exc,
                extra=logs.facts(alias=self._backend.config.alias, reason=str(exc)),
            )
            self._ended.extend(ended)

    def forget(self, lease: Lease) -> None:
        """Renew a lost lease no more. Called from the keeper's own thread as well."""
        with self._lock:
            self._due.pop(lease, None)

    def leases(self) -> list[Lease]:
        """What is renewed."""
        with self._lock:
            return list(self._due)

    def postpone(self, lease: Lease) -> None:
        """Note that `lease` was renewed by its holder."""
        with self._lock:
            if lease in self._due:
                self._due[lease] = self._due_after(lease)

    def lose(self, owners: Sequence[str]) -> None:
        """Note that the sessions of these owners died."""
        with self._lock:
            dead = [lease for lease in self._due if lease.owner_id in owners]
        self._give_up({lease: self._ended_with_session(lease) for lease in dead}, guessed=True)

    def _ended_with_session(self, lease: Lease) -> str:
        # The server may end the session of an expired lock.
        too_long = lease.expired and lease.held_too_long
        return _too_long(lease) if too_long else "the session that held it ended"

    def end(self, lease: Lease) -> None:
        """Give up a lease that was held for too long."""
        self._give_up({lease: _too_long(lease)})
        if self._backend.supports_ttl:
            return
        # Only now, when it is marked as lost: another owner may get it at once. A session lives on
        # when its locks are renewed no more, and keeps them.
        try:
            self._backend.release(lease.grant)
        except Exception as exc:
            notify(
                logger.warning,
                "Lock %r is left to its session's end",
                lease.name,
                exc_info=exc,
                extra=logs.about(lease),
            )

    def tick(self) -> float | None:
        """Renew all that is due. Returns the seconds until more is, or None if nothing will be."""
        batch, ended = self._take_batch()
        if batch:
            try:
                answers = self._renew(batch)
            finally:
                self._end_batch()
            refused = [
                lease
                for lease, answer in zip(batch, answers, strict=True)
                if answer is Renewal.LOST
            ]
            self._give_up(dict.fromkeys(refused, REFUSED), guessed=True)
            self._report(batch, answers)
        for lease in ended:
            self.end(lease)
        self._look_at_doubts(batch)
        if self._clear_at is not None and self._clear_at <= self._clock():
            self._clear_at = None
            self._ask_registry()
        with self._lock:
            upcoming = self._next()
            # The thread sleeps as long as it planned to when a lease is released early: otherwise
            # the next one would have to wake it.
            if upcoming is not None or self._wakes_at <= self._clock():
                self._wakes_at = math.inf if upcoming is None else upcoming
        return None if upcoming is None else max(0.0, upcoming - self._clock())

    def _take_batch(self) -> tuple[list[Lease], list[Lease]]:
        """Return what to renew, and what has expired since it was held for too long."""
        now = self._clock()
        batch: list[Lease] = []
        ended: list[Lease] = []
        with self._lock:
            if not any(due <= now for due in self._due.values()):
                return batch, ended
            for lease, due in self._due.items():
                if lease.is_left():
                    lease.let_go()
                if lease.held_too_long:
                    self._due[lease] = lease.deadline
                    if lease.expired:
                        ended.append(lease)
                # Whatever is half-way to its turn comes along, so that the leases of a process
                # soon share one round, however far apart they were acquired.
                elif due <= now + lease.ttl / BEATS / 2:
                    batch.append(lease)
            self._batch = frozenset(batch)
            self._batch_done = threading.Event()
            return batch, ended

    def _end_batch(self) -> None:
        with self._lock:
            self._batch = frozenset()
            self._batch_done.set()

    def _report(self, batch: list[Lease], answers: list[Renewal]) -> None:
        """Leave to other threads what is to be done about a batch that was renewed."""
        if not runtime.is_behind():
            backend = self._backend
            known = {"leases": batch, "answers": answers}
            notify(emit, Kind.RENEWED, type(backend), backend.config.alias, "", None, **known)
        if self._fences is not None:
            # What a test's own transaction has recorded can't be seen from here.
            self._ask_registry(
                lease
                for lease, answer in zip(batch, answers, strict=True)
                if answer is Renewal.KEPT and lease.fenced and not lease.lent
            )

    def _ask_registry(self, renewed: Iterable[Lease] = ()) -> None:
        """Make the registry's thread renew rows, and delete those whose locks were released."""
        with self._lock:
            # While the database hangs one job waits, whatever it is asked for meanwhile.
            is_asked, self._is_asked = self._is_asked, True
            self._renewed.update(dict.fromkeys(renewed))
        if not is_asked:
            self._registry.put(self._tend_registry)

    def _tend_registry(self) -> None:
        with self._lock:
            # One that was released meanwhile has no row, or its row is about to be deleted.
            leases = [lease for lease in self._renewed if lease in self._due]
            self._is_asked = False
            self._renewed.clear()
        try:
            self._give_up(dict.fromkeys(self.compare(leases), REFUSED), guessed=True)
        finally:
            self.clear()

    def compare(self, leases: Sequence[Lease]) -> list[Lease]:
        """Renew the rows of leases; release and return those that a newer grant came after."""
        if not leases or self._fences is None:
            return []
        by_owner = {lease.owner_id: lease for lease in leases}
        try:
            overtaken = self._fences.renew([lease.grant for lease in leases])
        except Error as exc:
            # The service has renewed the leases, and the fence rejects the writes of those
            # overtaken.
            logger.warning(
                "The registry of alias %r wasn't renewed: %s",
                self._backend.config.alias,
                exc,
                extra=logs.facts(alias=self._backend.config.alias, reason=str(exc)),
            )
            return []
        for grant in overtaken:
            with contextlib.suppress(BackendUnavailable):
                self._backend.release(grant)
        return [by_owner[grant.owner] for grant in overtaken]

    def _look_at_doubts(self, batch: Sequence[Lease]) -> None:
        now = self._clock()
        with self._lock:
            due = [grant for grant, at, _ in self.doubts.values() if at <= now]
            for grant in due:
                _, _, noted = self.doubts.pop(grant.owner)
                if now < noted + DOUBTED:
                    # 1, 2, 4, ... seconds after it was noted.
                    again = noted + 2 * max(FIRST_DOUBT, now - noted)
                    self.doubts[grant.owner] = grant, again, noted
        if not due:
            return
        if not batch:
            # A session that no lease needs is kept until its doubts are over.
            with contextlib.suppress(Exception):
                self._backend.renew([])
        self._releaser.put(partial(self._release_doubts, due))

    def _release_doubts(self, due: Sequence[Grant]) -> None:
        for grant in due:
            # The service is away: the next beat asks it again.
            with contextlib.suppress(BackendUnavailable):
                self._backend.release(grant)
                continue
            return

    def _renew(self, batch: list[Lease]) -> list[Renewal]:
        # The clock is read before the request: the service counts the ttl from later on.
        since = self._clock()
        ttls = [lease.ttl for lease in batch]
        try:
            answers = self._backend.renew([lease.grant for lease in batch])
        except Exception as exc:
            notify(
                logger.warning,
                "The renewal of %d leases of alias %r failed",
                len(batch),
                self._backend.config.alias,
                exc_info=exc,
                extra=logs.facts(alias=self._backend.config.alias),
            )
            answers = [Renewal.UNKNOWN] * len(batch)
        for lease, ttl, answer in zip(batch, ttls, answers, strict=True):
            self._note(lease, answer, since, ttl)
        return answers

    def _note(self, lease: Lease, answer: Renewal, since: float, ttl: float) -> None:
        if answer is Renewal.KEPT:
            # Its holder's own renewal may have come after it, with a shorter ttl.
            lease.deadline = since + min(ttl, lease.ttl)
        elif answer is Renewal.LOST:
            return
        elif lease.expired:
            self._give_up({lease: f"it couldn't be renewed within its ttl of {lease.ttl:g} s"})
            return
        with self._lock:
            if lease in self._due:
                self._due[lease] = (
                    self._due_after(lease)
                    if answer is Renewal.KEPT
                    else self._clock() + min(1.0, lease.ttl / BEATS / 4)
                )

    def _give_up(self, reasons: Mapping[Lease, str], *, guessed: bool = False) -> None:
        """Mark leases as lost at once, and report them from the notifier's thread."""
        with self._lock:
            kept = [lease for lease in reasons if self._due.pop(lease, None) is not None]
        lost = [lease for lease in kept if lease.mark_lost(reasons[lease], guessed=guessed)]
        if lost:
            notify(self._report_losses, lost)

    def _next(self) -> float | None:
        """The time of the next work; called with the lock held."""
        times = [*self._due.values(), *(at for _, at, _ in self.doubts.values())]
        if self._clear_at is not None:
            times.append(self._clear_at)
        return min(times, default=None)

    def _due_after(self, lease: Lease) -> float:
        deadline = lease.deadline
        due = deadline - lease.grant.ttl * (1 - 1 / BEATS)
        # After max_hold, only its end is noted.
        return due if lease.max_hold is None or due <= lease.renewed_until else deadline

    def _rouse(self, due: float) -> None:
        """
        See to it that the thread runs, and wakes by `due`.

        An interrupt between any two lines leaves no note of what wasn't done: no later lease would
        be renewed. RuntimeError: there are too many threads, or the interpreter ends.
        """
        with self._lock:
            if not self._runs:
                runtime.start(self._run)
            elif due < self._wakes_at:
                self._wake.put(None)
                self._wakes_at = due

    def _run(self) -> None:
        with self._lock:
            if self._runs:
                # Another one was started before it could note that it runs.
                return
            self._runs = True
        threading.current_thread().name = f"fencedlock-keeper-{self._backend.config.alias}"
        wake = self._wake
        wait: float | None = 0.0
        while True:
            try:
                wake.get(timeout=LINGER if wait is None else wait)
                while not wake.empty():
                    wake.get()
            except runtime.Empty:
                if wait is None and self._may_end():
                    return
            try:
                wait = self.tick()
                if wait is None and self._wakes_at < math.inf:
                    wait = max(0.0, self._wakes_at - self._clock())
            except Exception as exc:
                # Without this thread every lease of the process would expire.
                alias = self._backend.config.alias
                notify(logger.error, "The keeper of alias %r failed", alias, exc_info=exc)
                wait = 1.0

    def _may_end(self) -> bool:
        with self._lock:
            idle = self._next() is None
            self._runs = not idle
            return idle


def _too_long(lease: Lease) -> str:
    return f"held for longer than max_hold={lease.max_hold:g} s; it is no longer renewed"
