"""The keeper renews the leases of one alias in batches, and marks those that are lost."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

from .. import logs, signals
from ..backends.base import Backend, Renewal
from ..lease import Lease
from ..storage.unfenced import rows as unfenced_rows
from . import runtime
from .runtime import clock, notify

logger = logging.getLogger(__name__)

#: A lease is renewed so many times within its ttl.
BEATS = 3
#: Seconds from a release to the tidying that follows it.
TIDY_AFTER = 1.0
#: Seconds for which the thread waits for new leases before it ends.
LINGER = 30.0

#: Why a lease is lost, unless more is known.
REFUSED = "the lock service refused to renew it: somebody else had come"


class Keeper:
    """
    Renews every lease each third of its ttl.

    Its thread waits for the lock service of its alias alone, and runs no code of the user's:
    callbacks, signal receivers and log handlers run in the notifier's thread. A second thread
    renews the registry's rows and compares the fences, where the service is no database.

    A lease is lost when the service refuses it, or when its ttl is over and the last try to renew
    it failed. One that was held for its ``max_hold`` is renewed no more: it is lost when its ttl is
    over. `tick()` does all the work and may be driven without the thread.
    """

    def __init__(
        self,
        backend: Backend,
        report_losses: Callable[[Sequence[Lease]], object],
        clock: Callable[[], float] = clock,
    ) -> None:
        self._backend = backend
        #: Called from the notifier's thread with leases that were marked as lost.
        self._report_losses = report_losses
        self._clock = clock
        self._registry = runtime.Worker(f"fencedlock-registry-{backend.config.alias}")
        backend.lost_hook = self.lose
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = runtime.allocate_lock()
        # Weak: a lease to which nothing else refers is released.
        self._due: WeakKeyDictionary[Lease, float] = WeakKeyDictionary()
        self._tidy_at: float | None = None
        #: What the registry's thread is asked for: rows to be renewed, and `tidy()`.
        self._renewed: WeakKeyDictionary[Lease, None] = WeakKeyDictionary()
        self._tidies = self._is_asked = False
        self._batch: frozenset[Lease] = frozenset()
        self._batch_done = threading.Event()
        self._wake: runtime.SimpleQueue[None] = runtime.SimpleQueue()
        self._wakes_at = math.inf
        self._runs = False

    def forget_after_fork(self) -> None:
        """Keep nothing of the parent's; the threads stayed there."""
        self._reset()

    def keep(self, lease: Lease) -> None:
        """Renew `lease` from now on."""
        with self._lock:
            self._due[lease] = due = self._due_after(lease)
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
            tidy_at = None
            if self._tidy_at is None and not self._backend.records_grants:
                self._tidy_at = tidy_at = self._clock() + TIDY_AFTER
        if done is not None:
            done.wait()
        if tidy_at is not None:
            # What can't be tidied must not keep the lock from being given back.
            with contextlib.suppress(RuntimeError):
                self._rouse(tidy_at)

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
        # Whoever wants a lock that ran out may end the session, when that has no other.
        too_long = lease.expired and lease.held_too_long
        return _too_long(lease) if too_long else "the session that held it ended"

    def end(self, lease: Lease) -> None:
        """Give up a lease that was held for too long."""
        self._give_up({lease: _too_long(lease)})
        if self._backend.supports_ttl:
            return
        # Only now, when it is known to be lost: somebody may get it at once. A session lives on
        # when its locks are renewed no more, and keeps them.
        try:
            self._backend.release(lease)
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
        self._tidy_if_due()
        with self._lock:
            upcoming = self._next()
            self._wakes_at = math.inf if upcoming is None else upcoming
        return None if upcoming is None else max(0.0, upcoming - self._clock())

    def _take_batch(self) -> tuple[list[Lease], list[Lease]]:
        """What is to be renewed, and what has run out since it was held for too long."""
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
        unfenced_rows.renewed(self._backend, batch, answers)
        if signals.leases_renewed.receivers and not runtime.is_behind():
            notify(
                signals.send,
                signals.leases_renewed,
                type(self._backend),
                alias=self._backend.config.alias,
                leases=batch,
                answers=answers,
            )
        if not self._backend.records_grants:
            kept = [
                lease
                for lease, answer in zip(batch, answers, strict=True)
                if answer is Renewal.KEPT and lease.fenced
            ]
            if kept:
                self._ask_registry(kept)

    def _ask_registry(self, renewed: Sequence[Lease] = (), *, tidies: bool = False) -> None:
        """Have the registry's thread renew rows, and tidy up if asked to."""
        with self._lock:
            # While the database hangs one job waits, whatever it is asked for meanwhile.
            is_asked, self._is_asked = self._is_asked, True
            self._renewed.update(dict.fromkeys(renewed))
            self._tidies = self._tidies or tidies
        if not is_asked:
            self._registry.put(self._tend_registry)

    def _tend_registry(self) -> None:
        with self._lock:
            # One that was released meanwhile has no row, or its row waits for `tidy()`.
            leases = [lease for lease in self._renewed if lease in self._due]
            tidies, self._tidies, self._is_asked = self._tidies, False, False
            self._renewed.clear()
        try:
            overtaken = self._backend.renew_rows(leases) if leases else ()
            self._give_up(dict.fromkeys(overtaken, REFUSED), guessed=True)
        finally:
            if tidies:
                self._backend.tidy()

    def _renew(self, batch: list[Lease]) -> list[Renewal]:
        # The clock is read before the request: the service counts the ttl from later on.
        since = self._clock()
        ttls = [lease.ttl for lease in batch]
        try:
            answers = self._backend.renew(batch)
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
            lease.extend_from(since, min(ttl, lease.ttl))
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

    def _tidy_if_due(self) -> None:
        with self._lock:
            due = self._tidy_at is not None and self._tidy_at <= self._clock()
            if due:
                self._tidy_at = None
        if due:
            self._ask_registry(tidies=True)

    def _next(self) -> float | None:
        """The time of the next work; called with the lock held."""
        times = [*self._due.values()]
        if self._tidy_at is not None:
            times.append(self._tidy_at)
        return min(times, default=None)

    def _due_after(self, lease: Lease) -> float:
        due = lease.deadline - lease.ttl * (1 - 1 / BEATS)
        # Nothing more is due then but to note its end.
        return due if due <= lease.renewed_until else lease.deadline

    def _rouse(self, due: float) -> None:
        """See to it that the thread runs, and wakes by `due`."""
        with self._lock:
            start, self._runs = not self._runs, True
            sooner = due < self._wakes_at
            self._wakes_at = min(due, self._wakes_at)
        if start:
            try:
                runtime.start(self._run)
            except RuntimeError:
                # There are too many, or the interpreter ends: the next lease tries again.
                self._runs = False
                raise
        elif sooner:
            self._wake.put(None)

    def _run(self) -> None:
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
