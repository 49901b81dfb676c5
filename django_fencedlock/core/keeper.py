"""The keeper renews the leases of one alias in batches, and marks those that are lost."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
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
#: Seconds for which a doubt is kept, until its first release, and between two.
DOUBTED, FIRST_DOUBT, DOUBT_PAUSE = 60.0, 1.0, 5.0
#: Owners whose doubts are kept.
MAX_DOUBTS = 1000

#: Why a lease is lost, unless more is known.
REFUSED = "the lock service refused to renew it: another holder had come"


class Keeper:
    """
    Renews every lease each third of its ttl, in a thread that waits for the lock service alone.

    Callbacks, signal receivers and log handlers run in the notifier's thread. A second thread
    renews the registry's rows and compares the fences, where the service doesn't, and releases
    doubts by their owners' ids: acquires that raised, and releases that failed.

    A lease is lost when the service refuses it, or when its ttl is over. One that was held for its
    ``max_hold`` isn't renewed any more.
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
        self._report_losses = report_losses
        self._clock = clock
        alias = backend.config.alias
        self._thread = runtime.Worker(f"fencedlock-keeper-{alias}", self.tick)
        self._tending = runtime.Worker(f"fencedlock-tending-{alias}", self.tend)
        self.after_fork()

    def after_fork(self) -> None:
        """Keep nothing of the parent's; the threads stayed there."""
        self._lock = runtime.allocate_lock()
        # Weak: a lease to which nothing else refers is released.
        self._due: WeakKeyDictionary[Lease, float] = WeakKeyDictionary()
        self._wakes_at = math.inf
        self._batch: frozenset[Lease] = frozenset()
        self._batch_done = threading.Event()
        #: For the second thread: rows to renew, and rows to delete at a time.
        self._renewed: WeakKeyDictionary[Lease, None] = WeakKeyDictionary()
        self._ended: deque[Grant] = deque(maxlen=MAX_ROWS)
        self._clear_at = math.inf
        #: By owner id: its grants by name, and until when they are released again. An owner has
        #: several if it asked for one of several permits.
        self.doubts: OrderedDict[str, tuple[Mapping[str, Grant], float]] = OrderedDict()
        self._release_at = math.inf

    def keep(self, lease: Lease) -> None:
        """Renew `lease` from now on. RuntimeError: no thread can be started."""
        with self._lock:
            self._plan(lease)

    def renewed(self, lease: Lease) -> None:
        """Note that the holder renews `lease`, maybe with another ttl."""
        with self._lock:
            if lease in self._due:
                self._plan(lease)

    def _plan(self, lease: Lease) -> None:
        self._due[lease] = due = self._due_after(lease)
        if due < self._wakes_at or self._thread.thread() is None:
            # In this order: an interrupt in between leaves no note of what wasn't done.
            if not self._thread.wake():
                raise RuntimeError("can't start new thread")
            self._wakes_at = due

    def drop(self, lease: Lease) -> None:
        """Renew `lease` no more, and wait for a batch that would acquire its lock again."""
        with self._lock:
            self._due.pop(lease, None)
            done = self._batch_done if lease in self._batch else None
        if done is not None:
            done.wait()

    def clear_row(self, grant: Grant) -> None:
        """Delete a grant's row of the registry soon, from the second thread."""
        if self._fences is None or not grant.fenced:
            return
        self._ended.append(grant)
        if self._clear_at == math.inf or self._tending.thread() is None:
            self._clear_at = self._clock() + CLEAR_AFTER
            # If no thread can be started, the next release tries again; the lock is released.
            self._tending.wake()

    def doubt(self, *grants: Grant) -> None:
        """
        Release the grants of one owner again and again for a minute.

        The service may have granted one of them, or may yet.
        """
        now, owner = self._clock(), grants[0].owner
        if owner in self.doubts or len(self.doubts) < MAX_DOUBTS:
            before, _ = self.doubts.get(owner, ({}, now))
            self.doubts[owner] = {**before, **{each.name: each for each in grants}}, now + DOUBTED
        self._release_at = min(self._release_at, now + FIRST_DOUBT)
        # If no thread can be started, the keeper's next beat tries again.
        self._tending.wake()

    def trust(self, owner: str, name: str) -> None:
        """Release a grant no more: the owner's next request for it was answered."""
        if owner in self.doubts:
            grants, until = self.doubts.pop(owner)
            if rest := {key: each for key, each in grants.items() if key != name}:
                self.doubts[owner] = rest, until

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
            self._warn("Rows of alias %r weren't deleted: %s", exc)
            self._ended.extend(ended)

    def _warn(self, message: str, error: Error) -> None:
        alias, reason = self._backend.config.alias, str(error)
        logger.warning(message, alias, reason, extra=logs.facts(alias=alias, reason=reason))

    def forget(self, lease: Lease) -> None:
        """Renew `lease` no more."""
        with self._lock:
            self._due.pop(lease, None)

    def leases(self) -> list[Lease]:
        with self._lock:
            return list(self._due)

    def end(self, lease: Lease) -> None:
        """Give up a lease that was held for too long."""
        self._give_up({lease: _too_long(lease)})
        self.free(lease)

    def free(self, lease: Lease) -> None:
        """Release a lease that is marked as lost: another owner may get it. A session keeps it."""
        if self._backend.supports_ttl:
            return
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
                with self._lock:
                    self._batch = frozenset()
                    self._batch_done.set()
            refused = [lease for lease, answer in answers.items() if answer is Renewal.LOST]
            self._give_up(dict.fromkeys(refused, REFUSED), guessed=True)
            self._report(answers)
        for lease in ended:
            self.end(lease)
        with self._lock:
            upcoming = min(self._due.values(), default=math.inf)
            # Not later than planned: otherwise each lease after an early release would wake it.
            if upcoming < math.inf or self._wakes_at <= self._clock():
                self._wakes_at = upcoming
            return self._until(self._wakes_at)

    def _until(self, moment: float) -> float | None:
        return None if moment == math.inf else max(0.0, moment - self._clock())

    def _take_batch(self) -> tuple[list[Lease], list[Lease]]:
        """Return what to renew, and what has expired since it was held for too long."""
        now, batch, ended = self._clock(), list[Lease](), list[Lease]()
        with self._lock:
            if not any(due <= now for due in self._due.values()):
                return batch, ended
            for lease, due in self._due.items():
                if lease.is_left() and (who := lease.who) is not None:
                    # A lease to which nothing else refers is released.
                    who.leases.clear()
                if lease.held_too_long:
                    self._due[lease] = lease.deadline
                    if lease.expired:
                        ended.append(lease)
                # What is half-way to its turn comes along, so that all leases soon share a batch.
                elif due <= now + lease.ttl / BEATS / 2:
                    batch.append(lease)
            self._batch = frozenset(batch)
            self._batch_done = threading.Event()
            return batch, ended

    def _report(self, answers: Mapping[Lease, Renewal]) -> None:
        """Leave to other threads what is to be done about a batch that was renewed."""
        if runtime.worker.waiting <= runtime.MAX_QUEUED:
            known = {"leases": list(answers), "answers": list(answers.values())}
            notify(emit, Kind.RENEWED, self._backend, "", **known)
        with self._lock:
            for lease, answer in answers.items():
                # What a test's own transaction has recorded can't be seen from here.
                if answer is Renewal.KEPT and lease.fenced and self._fences and not lease.lent:
                    self._renewed[lease] = None
        if self._renewed or self.doubts:
            self._tending.wake()

    def tend(self) -> float | None:
        """Renew and delete rows, and release doubts; return the seconds until more is due."""
        with self._lock:
            # One that was released meanwhile has no row, or its row is about to be deleted.
            leases = [lease for lease in self._renewed if lease in self._due]
            self._renewed.clear()
        try:
            self._give_up(dict.fromkeys(self.compare(leases), REFUSED), guessed=True)
        finally:
            if self._clear_at <= self._clock():
                self._clear_at = math.inf
                self.clear()
            if self._release_at <= self._clock():
                self._release_doubts()
        return self._until(min(self._clear_at, self._release_at))

    def compare(self, leases: Sequence[Lease]) -> list[Lease]:
        """Renew the rows of leases; release and return those that a newer grant came after."""
        if not leases or self._fences is None:
            return []
        by_owner = {lease.owner_id: lease for lease in leases}
        try:
            overtaken = self._fences.renew([lease.grant for lease in leases])
        except Error as exc:
            # The fence rejects the writes of those overtaken.
            self._warn("The registry of alias %r wasn't renewed: %s", exc)
            return []
        for grant in overtaken:
            with contextlib.suppress(BackendUnavailable):
                self._backend.release(grant)
        return [by_owner[grant.owner] for grant in overtaken]

    def _release_doubts(self) -> None:
        now, self._release_at = self._clock(), math.inf
        found = list(self.doubts.items())
        for owner, (_, until) in found:
            if until <= now:
                self.doubts.pop(owner, None)
        if self.doubts:
            self._release_at = min(self._release_at, now + DOUBT_PAUSE)
        # If the service is away, the next round asks it again.
        with contextlib.suppress(BackendUnavailable):
            # A session that no lease needs is kept until its doubts are over.
            self._backend.renew([])
            for owner, (grants, _) in found:
                try:
                    if len(grants) == 1:
                        self._backend.release(*grants.values())
                    else:
                        self._backend.release_all([*grants.values()])
                except BackendUnavailable:
                    # The last one of the next round: others may be on a node that answers.
                    with contextlib.suppress(KeyError):
                        self.doubts.move_to_end(owner)
                    if self._clock() > now + FIRST_DOUBT:
                        return

    def _renew(self, batch: list[Lease]) -> dict[Lease, Renewal]:
        # Before the request: the service counts the ttl from later on.
        since, ttls = self._clock(), [lease.ttl for lease in batch]
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
        return dict(zip(batch, answers, strict=True))

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
                soon = self._clock() + min(1.0, lease.ttl / BEATS / 4)
                self._due[lease] = self._due_after(lease) if answer is Renewal.KEPT else soon

    def _give_up(self, reasons: Mapping[Lease, str], *, guessed: bool = False) -> None:
        """Mark leases as lost at once, and report them from the notifier's thread."""
        with self._lock:
            kept = [lease for lease in reasons if self._due.pop(lease, None) is not None]
        lost = [lease for lease in kept if lease.mark_lost(reasons[lease], guessed=guessed)]
        if lost:
            notify(self._report_losses, lost)

    def _due_after(self, lease: Lease) -> float:
        deadline = lease.deadline
        due = deadline - lease.grant.ttl * (1 - 1 / BEATS)
        # After max_hold, only its end is noted.
        return due if due <= lease.renewed_until else deadline


def _too_long(lease: Lease) -> str:
    max_hold = lease.renewed_until - lease.granted_at
    return f"held for longer than max_hold={max_hold:g} s; it is no longer renewed"
