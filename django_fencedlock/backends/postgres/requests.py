"""The requests to a session that takes and holds locks: each is one statement."""

from __future__ import annotations

import contextlib
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.db import Error

from ...conf import AliasConfig
from ...core.identity import Owner
from ...core.runtime import clock
from ...exceptions import BackendUnavailable
from ...storage.dialect import entry_of
from ...storage.postgresql import sqlstate
from ..interface import Claim, Grant, Granted, Held, Renewal
from . import statements as sql
from .holding import Hold, SessionLocks
from .sessions import LOCKED, PoolsTransactions, Session

#: How often one reader may be overtaken by a change of the fence, after it got the lock.
ATTEMPTS = 4
#: Locks that one process may hold. At default settings some 12,800 fill the server's lock table,
#: and then no client can connect any more, to any database.
MAX_LOCKS = 1000


class Requests:
    """What the thread of an alias's session locks asks the server."""

    def __init__(self, config: AliasConfig, label: str, local: SessionLocks) -> None:
        self._config, self._label, self._local = config, label, local
        self.max_locks: int = config.options.get("MAX_LOCKS", MAX_LOCKS)

    def key(self, name: str) -> int:
        """Return the lock's key: 64 bits, so two names in use never share one in practice."""
        text = f"{self._config.key_prefix}\0{name}".encode()
        digest = hashlib.blake2b(text, digest_size=8, person=b"fencedlock").digest()
        return int.from_bytes(digest, "big", signed=True)

    # Claim

    def acquire(self, claim: Claim, key: int, *, in_turn: bool = False) -> Granted | Held:
        # By the thread alone, so that no try overlaps another.
        if answer := self._local.decide(claim, key, in_turn=in_turn):
            return answer
        hold = Hold(claim, key, self._session_for([claim]), claim.ttl)
        return self._send([hold], sql.TRY[claim.shared, claim.fenced])[claim.name]

    def wait(self, session: Session, claim: Claim, key: int, seconds: float) -> Granted | Held:
        """Wait for a lock on a session of its own, by a thread of its own."""
        hold = Hold(claim, key, session, claim.ttl)
        return self._send([hold], sql.WAIT[claim.shared, claim.fenced], seconds)[claim.name]

    def acquire_all(self, claims: Sequence[Claim]) -> list[Granted] | dict[str, Held]:
        """Take all locks or none, for one holder, and exclusively."""
        rest: dict[int, Claim] = {}
        answers: dict[str, Granted | Held] = {}
        for claim in claims:
            key = self.key(claim.name)
            if answer := self._local.decide(claim, key):
                answers[claim.name] = answer
            else:
                rest[key] = claim
        if rest and not _refused(answers):
            session = self._session_for(claims)
            holds = [Hold(claim, key, session, claim.ttl) for key, claim in rest.items()]
            alone, many = sql.TRY[False, claims[0].fenced], sql.TRY_ALL[claims[0].fenced]
            answers |= self._send(holds, many if len(holds) > 1 else alone)
        if refused := _refused(answers):
            # The owners may have had some of the locks before.
            self.release_all([each.handle for each in _granted(answers.values())])
            return refused
        return _granted(answers[claim.name] for claim in claims)

    def _session_for(self, claims: Sequence[Claim]) -> Session:
        if len(self._local.by_key) + len(claims) > self.max_locks:
            name = claims[-1].name
            raise BackendUnavailable(
                f"Lock {name!r} would be one more than the {self.max_locks} that a process "
                f"may hold through {self._config.where()}. Hold fewer at once, or raise "
                "OPTIONS['MAX_LOCKS'] and the server's max_locks_per_transaction with it.",
                name=name,
                alias=self._config.alias,
            )
        return self._local.session(claims[0].ttl)

    def _send(
        self, holds: Sequence[Hold], statement: str, wait: float = 0.0
    ) -> dict[str, Granted | Held]:
        """
        Claim all keys or none on one session; return all grants, or what refused some.

        Unless they are granted, the session doesn't get the keys.
        """
        since, session = clock(), holds[0].session
        try:
            given = self._values(holds, wait)
            rows = session.all(statement, given, wait=wait)
            for _ in range(ATTEMPTS):
                if not (holds[0].claim.shared and _came_after_snapshot(holds[0].claim, rows[0])):
                    break
                rows = session.all(sql.TRY[True, True], {**given, "how": "again"})
        except Error as exc:
            # An error undoes the records, but not the locks.
            self._unlock_after_error(session, holds)
            if sqlstate(exc) in LOCKED:
                # The time is up; or the keys were free, but a transaction has a row locked.
                return {hold.claim.name: Held() for hold in holds}
            raise
        if rows[0][2] != session.pid:
            session.close()
            raise PoolsTransactions(self._local.route)
        is_free = all(free for free, *_ in rows)
        answers = {
            hold.claim.name: self._answer(hold, since, *row)
            for hold, row in zip(holds, rows, strict=True)
            if is_free or not row[0]
        }
        if refused := _refused(answers):
            if is_free:
                self._unlock(session, holds)
            return {**refused}
        for hold in holds:
            self._local.add(hold)
        return answers

    def _unlock_after_error(self, session: Session, holds: Sequence[Hold]) -> None:
        """Unlock what a failed statement may have locked, or have left locked."""
        shared = holds[0].claim.shared
        # Other readers of the session keep their key.
        if not session.closed and not (shared and self._local.has(session, holds[0].key)):
            session.unlock([hold.key for hold in holds], shared=shared)

    def _answer(
        self, hold: Hold, since: float, free: bool, token: int | None, _: Any, __: Any, *row: Any
    ) -> Granted | Held:
        if free and (token is not None or not hold.claim.fenced):
            hold.granted = Granted(token, since, hold)
            return hold.granted
        held = read_holder(row) if row and row[0] else Held()
        if not free:
            return held
        # After a wait, it is the row from before the wait: the next try sees the present one.
        elsewhere = held.owner and (row[10], row[11]) != (self._config.alias, self._label)
        return held._replace(alias=row[10], label=row[11]) if elsewhere else Held()

    def _values(self, holds: Sequence[Hold], wait: float) -> dict[str, Any]:
        session, claim, key = holds[0].session, holds[0].claim, holds[0].key
        given: dict[str, Any] = {"session_key": key, "idle": _idle(max(session.ttl, claim.ttl))}
        if claim.shared:
            given["how"] = "join" if self._local.has(session, key) else "try"
        # Zero would mean no limit.
        given["wait"] = f"{max(1, round(wait * 1000))}ms"
        if claim.fenced:
            entry = entry_of(claim, self._config.alias, self._label)
            entry.session_pid, entry.session_started = session.pid, session.started
            entry.session_key = key
            given |= {**entry.values(), "ttl": claim.ttl}
        return given | _arrays(holds) if len(holds) > 1 else given

    # Renew, verify, release

    def renew(self, holds: Iterable[Hold]) -> dict[str, Renewal]:
        """Renew locks by one statement for each session, which also keeps it from being idle."""
        answers: dict[str, Renewal] = {}
        for session in {hold.session for hold in holds}:
            each = {hold.claim.owner: hold for hold in holds if hold.session is session}
            session.ttl = max([hold.ttl for hold in session.holds], default=0.0)
            given = _arrays([*each.values()])
            given |= {"ttls": [hold.ttl for hold in each.values()], "idle": _idle(session.ttl)}
            try:
                rows = session.all(sql.RENEW, given, prepare=False)
            except Error:
                failed = Renewal.UNKNOWN if session.is_usable() else Renewal.LOST
                answers |= dict.fromkeys(each, failed)
            else:
                answers |= {owner: self._renewal(each[owner], *facts) for owner, *facts in rows}
        return answers

    def _renewal(self, hold: Hold, held: bool, renewed: bool, found: bool, forced: bool) -> Renewal:
        if held and not forced and (renewed or not hold.claim.fenced):
            return Renewal.KEPT
        if held and found:
            # A transaction has the row locked.
            return Renewal.UNKNOWN
        with contextlib.suppress(Error):
            self.release(hold)
        return Renewal.LOST

    def verify(self, hold: Hold) -> bool:
        given = {**hold.values(), "fenced": hold.claim.fenced}
        try:
            return bool(hold.session.one(sql.VERIFY, given)[0])
        except Error:
            if hold.session.closed:
                return False
            raise

    def release_owner(self, of: Claim | Grant) -> bool:
        """Release the lock of an owner in this process; return whether there was one."""
        hold = self._local.find(self.key(of.name), of.owner)
        if hold is None:
            return False
        # The forced release that it answers finds its own note.
        self.release(hold)
        return True

    def release(self, hold: Hold) -> bool:
        return self.release_all([hold])[0]

    def release_all(self, holds: Sequence[Hold | None]) -> list[bool]:
        """Release locks by one statement for each session; return which were held until now."""
        answers = [False] * len(holds)
        batches: defaultdict[tuple[Any, ...], dict[int, Hold]] = defaultdict(dict)
        for place, hold in enumerate(holds):
            if hold is not None and self._local.remove(hold):
                # Readers one by one: they may have one key.
                alone = place if hold.claim.shared else None
                batches[hold.session, hold.claim.fenced, alone][place] = hold
        # An error of one session doesn't keep the locks of another.
        with contextlib.ExitStack() as all_of_them:
            for (session, *_), batch in batches.items():
                all_of_them.callback(self._release_batch, session, batch, answers)
        return answers

    def _release_batch(
        self, session: Session, batch: Mapping[int, Hold], answers: list[bool]
    ) -> None:
        try:
            released = self._unlock(session, [*batch.values()])
            for place, answer in zip(batch, released, strict=True):
                answers[place] = answer
        finally:
            if session.waits:
                self._local.give_back(session)

    def _unlock(self, session: Session, holds: Sequence[Hold]) -> list[bool]:
        """Unlock keys of one session and delete the rows; return which keys it had."""
        claim = holds[0].claim
        if len(holds) == 1:
            given = holds[0].values() | {"last": not self._local.has(session, holds[0].key)}
            statement = sql.RELEASE[claim.shared, claim.fenced]
        else:
            given = _arrays(holds)
            statement = sql.RELEASE_ALL[claim.fenced]
        try:
            rows = session.all(statement, {**given, "idle": _idle(session.ttl)})
            return [bool(unlocked) and not forced for unlocked, forced, _ in rows]
        except Error as exc:
            if session.closed:
                # It isn't known when it ended: others may have had the locks since.
                return [False] * len(holds)
            self._unlock_after_error(session, holds)
            if sqlstate(exc) in LOCKED:
                # The keys are free. The transaction that has a row locked is about to take it.
                return [True] * len(holds)
            raise


def read_holder(row: Sequence[Any]) -> Held:
    """Read the columns of `statements.HOLDER`."""
    session_pid, _, _, shared, expires_in, held_for, token = row[9:]
    held = Held(row[0], Owner(*row[:9]).identity, token, expires_in, shared=shared)
    return held._replace(held_for=held_for, session_pid=session_pid)


def _arrays(holds: Sequence[Hold]) -> dict[str, Any]:
    """Return the parameters of a statement about many locks."""
    return {
        "names": [hold.claim.name for hold in holds],
        "owners": [hold.claim.owner for hold in holds],
        "keys": [hold.key for hold in holds],
    }


def _came_after_snapshot(claim: Claim, row: Sequence[Any]) -> bool:
    """Return whether a reader got the lock, and the fence is a writer's that it didn't see."""
    free, token, _, _, *holder = row
    return bool(free and claim.fenced and token is None and not holder[0])


def _idle(seconds: float) -> str:
    """Return a value of idle_session_timeout, which is a 32-bit number of milliseconds."""
    return f"{min(round(seconds * 1000), 2**31 - 1)}ms"


def _granted(answers: Iterable[Granted | Held]) -> list[Granted]:
    return [each for each in answers if isinstance(each, Granted)]


def _refused(answers: Mapping[str, Granted | Held]) -> dict[str, Held]:
    return {name: each for name, each in answers.items() if isinstance(each, Held)}
