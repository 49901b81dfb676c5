"""Locks as queues: each owner has an entry of its own, and the first ones have the lock."""

from __future__ import annotations

import contextlib
import math
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ..conf import AliasConfig, Problem
from ..core.runtime import allocate_lock, clock
from ..exceptions import BackendUnavailable
from .doubts import Doubts
from .interface import Backend, Claim, Grant, Granted, Held, Renewal, Wait
from .places import Entry, Place, Session, SessionGone, Watch

#: A session is renewed so many times within its ttl.
BEATS = 3
#: Seconds of one watch. Then the waiter looks for itself: a hint may be lost.
WATCH = 2.0
#: Seconds until another thread renews a session that one thread is about to renew.
PATIENCE = 1.0
#: Sessions that one acquire may open: each ended before its first use.
SESSIONS = 3
UNANSWERED = "a first request had no answer, and the repeated one found no entry"


class QueuedBackend(Backend):
    """
    The recipe for services with sessions, whose entries are gone when their session ends.

    A process has one session for each ttl. A writer has the lock if no entry is before its own, a
    reader if no writer's is. Each waiter watches the nearest such entry. The number of a writer's
    entry is its token. The service may get a request twice, or late.
    """

    supports_waiting = True
    supports_ttl = False
    #: What the methods below raise if the service doesn't answer within the timeout. The first
    #: one takes a text.
    errors: ClassVar[tuple[type[Exception], ...]]
    #: Bounds of a session's ttl, in seconds.
    shortest, longest = 1.0, math.inf

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        self._reset()

    def _reset(self) -> None:
        self._opening, self._dropping = threading.Lock(), allocate_lock()
        #: By ttl: when a session couldn't be opened, and why.
        self._failed: dict[float, tuple[float, str]] = {}
        self._sessions: dict[float, Session] = {}
        self._doubts = Doubts()

    def after_fork(self) -> None:
        self._reset()
        self.forget()

    @abstractmethod
    def open(self, ttl: float) -> Any:
        """Open a session, and return what the service knows it by."""

    @abstractmethod
    def keep(self, session: Any) -> bool:
        """Renew a session. Return False if it has ended."""

    @abstractmethod
    def end(self, session: Any) -> None:
        """End a session that has no entries."""

    @abstractmethod
    def enter(self, session: Any, claim: Claim, alone: bool) -> Place | Held:
        """
        Add the owner's entry to the queue, unless it has one, or raise `SessionGone`.

        If it is to be `alone` and the queue has an entry that excludes it, add nothing, and return
        who is first. A service whose `entries()` can't find strays looks first: a late copy may
        add the entry.
        """

    @abstractmethod
    def look(self, name: str, owner: str, number: int) -> Place | None:
        """Look up an entry, linearizably. None: it was released, or its session has ended."""

    @abstractmethod
    def watch(self, name: str, owner: str, place: Place, watch: Watch) -> None:
        """Return once the entry ahead may be gone, or after `watch.seconds`."""

    @abstractmethod
    def leave(self, name: str, owner: str) -> bool | None:
        """
        Delete this owner's entry, of any session. Return False if there was none.

        None: an earlier try of the request, which had no answer, may have deleted it.
        """

    @abstractmethod
    def entries(self, session: Any, names: Mapping[str, str]) -> Mapping[str, str]:
        """Return which of these entries a session has, and maybe its others: names by owner."""

    @abstractmethod
    def forget(self) -> None:
        """Drop inherited connections in a child process, without closing them."""

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        if config.ttl > cls.longest:
            what = f"{config.where('TTL')} is {config.ttl:g}: sessions of {cls.label} have at most"
            yield Problem("E003", f"{what} {cls.longest:g} s.", "Use a shorter one.")

    def acquire(self, claim: Claim, wait: Wait) -> Granted | Held:
        if claim.ttl > self.longest:
            what = f"Lock {claim.name!r} has a ttl of {claim.ttl:g} s, but sessions of {self.label}"
            raise ValueError(f"{what} have at most {self.longest:g} s. Use a shorter ttl.")
        answer, watch = None, Watch()
        wait.on_cancel(watch.stop)
        self._doubts.begin(claim.owner, claim.shared)
        try:
            with self._asking("acquire", claim.name):
                answer = self._queue(claim, wait, watch)
            return answer
        except BaseException as exc:
            if not isinstance(exc, BackendUnavailable):
                with contextlib.suppress(*self.errors):
                    self.leave(claim.name, claim.owner)
            raise
        finally:
            if not isinstance(answer, Granted):
                self._doubts.end(claim.name, claim.owner, is_sure=answer is not None)

    def _queue(self, claim: Claim, wait: Wait, watch: Watch) -> Granted | Held:
        """Enter the queue and wait in it; again if the entry is gone meanwhile."""
        held, ended = Held(), 0
        while True:
            session = self._doubts.owners[claim.owner] = self._session(claim.ttl)
            alone, found = not wait.left, None
            try:
                place = self.enter(session.id, claim, alone)
            except SessionGone:
                self._drop(session)
                ended += 1
                if ended == SESSIONS:
                    raise SessionGone("each session ended as soon as it was opened") from None
                continue
            if isinstance(place, Held):
                held = place
            else:
                found = place
                if place.is_repeated:
                    self._doubts.repeated.add(claim.owner)
            while found is not None:
                if found.ahead is None:
                    token = None if claim.shared else found.number
                    return Granted(token, session.since, Entry(session, found.number))
                held = found.first
                wait.refused(held)
                if not wait.left:
                    self.leave(claim.name, claim.owner)
                    return held
                watch.seconds = min(wait.left, WATCH, session.ttl / BEATS)
                self.watch(claim.name, claim.owner, found, watch)
                is_kept = self._is_kept(session)
                found = self.look(claim.name, claim.owner, found.number) if is_kept else None
            if alone or not wait.left:
                return held

    def _session(self, ttl: float) -> Session:
        """Return this process's session for a ttl, renewed lately."""
        seconds = min(max(self.shortest, math.ceil(ttl)), self.longest)
        session = self._sessions.get(seconds)
        if session and self._is_kept(session):
            return session
        began = clock()
        with self._opening:
            if session := self._sessions.get(seconds):
                return session
            # Each of ten threads would wait for as many timeouts as there are threads before it.
            if (failed := self._failed.get(seconds)) and failed[0] > began:
                raise self.errors[0](failed[1])
            since = clock()
            try:
                session = Session(self.open(seconds), seconds, since, since + seconds / BEATS)
            except self.errors as exc:
                # Not the error: by its traceback it would keep all variables of the callers.
                self._failed[seconds] = clock(), str(exc) or type(exc).__name__
                raise
            self._sessions[seconds] = session
            return session

    def _is_kept(self, session: Session) -> bool:
        """Renew a session if it is time to; return False if it has ended."""
        if (now := clock()) < session.due:
            return True
        # Not behind a lock: the keeper would wait for a thread that is paused in it.
        session.due = now + PATIENCE
        is_kept = self._beat(session, {}) is not None
        self._tidy()
        return is_kept

    def _drop(self, session: Session) -> None:
        # Two threads may notice its end, and a third one open another in between.
        with self._dropping:
            if self._sessions.get(session.ttl) is session:
                del self._sessions[session.ttl]

    def _beat(self, session: Session, names: Mapping[str, str]) -> Mapping[str, str] | None:
        """Renew a session; return its entries, at least those of `names`, or None if it ended."""
        since = clock()
        if not self.keep(session.id):
            self._drop(session)
            return None
        session.since = max(since, session.since)
        session.due = session.since + session.ttl / BEATS
        found = self.entries(session.id, names)
        session.strays = self._doubts.find_strays(found, session.strays)
        return found

    def _tidy(self) -> None:
        with contextlib.suppress(*self.errors):
            self._doubts.tidy(self.leave)

    def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        batches: dict[Session, dict[str, str]] = {}
        numbers: dict[str, int] = {}
        for grant, entry in [(each, each.handle) for each in grants if each.handle]:
            if grant.ttl > entry.session.ttl:
                what = f"Lock {grant.name!r} has a session of {entry.session.ttl:g} s, which can't "
                what += f"be extended to {grant.ttl:g} s. Acquire it with that ttl."
                raise ValueError(what)
            batches.setdefault(entry.session, {})[grant.owner] = grant.name
            numbers[grant.owner] = entry.number
        answers: dict[str, Renewal] = {}
        failures: list[BackendUnavailable] = []
        for session, names in batches.items():
            try:
                with self._asking("renew locks"):
                    found = dict(self._beat(session, names) or {})
                    # A late copy may have made an entry again, after a forced release.
                    for owner in self._doubts.repeated & found.keys() & names.keys():
                        if self.look(names[owner], owner, numbers[owner]) is None:
                            del found[owner]
                answers |= dict.fromkeys(found, Renewal.KEPT)
            except BackendUnavailable as exc:
                # With ZooKeeper, the others have connections of their own.
                answers |= dict.fromkeys(names, Renewal.UNKNOWN)
                failures.append(exc)
        if not failures:
            self._tidy()
        elif len(failures) == len(batches):
            raise failures[0]
        return [answers.get(each.owner, Renewal.LOST) for each in grants]

    def release(self, grant: Grant) -> bool:
        was_there, is_own = None, grant.owner in self._doubts.owners
        try:
            with self._asking("release", grant.name):
                was_there = self.leave(grant.name, grant.owner)
            if was_there is None:
                # Not False: the block would end with LeaseLost, though it held the lock.
                raise self.unavailable("release", TimeoutError(UNANSWERED), grant.name)
            return was_there
        finally:
            if is_own:
                self._doubts.end(grant.name, grant.owner, is_sure=was_there is not None)

    def verify(self, grant: Grant) -> bool:
        if grant.handle is None:
            return False
        with self._asking("verify", grant.name):
            place = self.look(grant.name, grant.owner, grant.handle.number)
        return place is not None and place.ahead is None

    def close(self) -> None:
        for session in set(self._sessions.values()).difference(self._doubts.owners.values()):
            self._drop(session)
            # Without an answer, it ends after its ttl.
            with contextlib.suppress(*self.errors):
                self.end(session.id)

    @contextlib.contextmanager
    def _asking(self, doing: str, name: str | None = None) -> Iterator[None]:
        errors: tuple[type[Exception], ...] = (SessionGone, *self.errors)
        try:
            yield
        except errors as exc:
            raise self.unavailable(doing, exc, name) from exc
