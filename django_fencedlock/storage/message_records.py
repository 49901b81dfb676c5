"""
The SQL of `MessageRecord`: which messages were begun, and how they ended.

The order carries the proof: the end is recorded before the lock is given back, and looked at after
the lock was got. So whoever has the lock knows of every end before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .dialect import BATCH, HELD, listed
from .records import Records, Statements, update
from .text import in_ascii

DELIVERY = "django_fencedlock_messagerecord"

#: Seconds after which an end is past: whatever a worker does after it has been done, or never is.
SETTLED = 10.0

_READ = f"FROM {DELIVERY} WHERE nonce = %(nonce)s"
_KNOWN = "tries, outcome, finished_at <= {settled}"
_DEAD = f"""NOT EXISTS (
    SELECT 1 FROM {HELD} h
    WHERE h.name = d.name AND h.owner = d.owner AND h.expires_at > {{now}})"""


@dataclass(frozen=True, slots=True)
class Message:
    """One delivery of a message."""

    nonce: str
    #: The lock's name, and the id of the run that this delivery became.
    name: str
    owner: str
    task_id: str
    #: For how many seconds the record is kept, from its last change.
    kept: float

    def given(self) -> dict[str, Any]:
        return {
            "nonce": self.nonce,
            "name": self.name,
            "owner": self.owner,
            # For people alone.
            "task_id": in_ascii(self.task_id)[:100],
        }


@dataclass(frozen=True, slots=True)
class Begun:
    """What is known of a message when a delivery of it begins."""

    tries: int
    #: How an earlier delivery ended; empty if none did.
    outcome: str
    #: Whether that was more than a moment ago.
    is_past: bool = False

    @property
    def is_first(self) -> bool:
        return self.tries == 1 and not self.outcome


def begin(statements: Statements, cursor: Any, message: Message) -> Begun:
    """Record that a delivery begins, unless an earlier one has ended; a part of a transaction."""
    new = {
        "nonce": "%(nonce)s",
        "name": "%(name)s",
        "owner": "%(owner)s",
        "task_id": "%(task_id)s",
        "tries": "1",
        "began_at": statements.now,
        "outcome": "''",
        "kept_until": statements.later("kept"),
    }
    old = f"{DELIVERY}."
    again = {
        # The same run may come twice, if an answer was lost.
        "tries": f"CASE WHEN {old}outcome <> '' OR {old}owner = %(owner)s "
        f"THEN {old}tries ELSE {old}tries + 1 END",
        "kept_until": f"CASE WHEN {old}outcome <> '' THEN {old}kept_until "
        f"ELSE {statements.later('kept')} END",
        "owner": f"CASE WHEN {old}outcome <> '' THEN {old}owner ELSE %(owner)s END",
    }
    given = {**message.given(), **statements.times(kept=message.kept, settled=-SETTLED)}
    sql = statements.upsert(DELIVERY, new, ["nonce"], again)
    found = statements.written(cursor, sql, given, _known(statements), _READ)
    assert found is not None
    return _begun(found)


def _known(statements: Statements) -> str:
    return _KNOWN.format(settled=statements.later("settled"))


def _begun(row: Sequence[Any]) -> Begun:
    tries, outcome, is_past = row
    return Begun(tries, outcome, bool(is_past))


class MessageRecords(Records):
    """The messages of one alias."""

    def begin(self, message: Message) -> Begun:
        """Record that a delivery begins, unless an earlier one has ended."""

        def work(statements: Statements) -> Begun:
            with statements.cursor(atomic=False, often=True) as cursor:
                return begin(statements, cursor, message)

        return self.run("beginning of a delivery", message.name, work)

    def finish(self, message: Message, outcome: str) -> bool:
        """Record how it ended; False if another delivery has taken it over, or finished it."""

        def work(statements: Statements) -> bool:
            with statements.cursor(atomic=False, often=True) as cursor:
                sets = {
                    "finished_at": statements.now,
                    "outcome": "%(outcome)s",
                    "kept_until": statements.later("kept"),
                }
                mine = "nonce = %(nonce)s AND owner = %(owner)s AND outcome = ''"
                given = {**message.given(), **statements.times(kept=message.kept)}
                cursor.execute(update(DELIVERY, sets, mine), {**given, "outcome": outcome})
                return bool(cursor.rowcount)

        return self.run("end of a delivery", message.name, work)

    def newest(self, nonce: str, name: str) -> tuple[str, Begun] | None:
        """
        Which run the newest delivery of a message became, and what is known of the message.

        None if none was begun.
        """

        def work(statements: Statements) -> tuple[str, Begun] | None:
            with statements.reading() as cursor:
                given = {"nonce": nonce, **statements.times(settled=-SETTLED)}
                cursor.execute(f"SELECT owner, {_known(statements)} {_READ}", given)
                found = cursor.fetchone()
                return None if found is None else (str(found[0]), _begun(found[1:]))

        return self.run("look at a delivery", name, work)

    def sweep(self, batches: int, until: Any = None) -> int:
        """
        Delete what was kept long enough, but for what still runs; returns how many.

        Args:
            until: Delete what is to be kept until then at the longest, rather than until now.
        """
        return self.in_batches(
            "sweeping of deliveries", batches, lambda found: _sweep(found, until)
        )

    def limit(self, most: int) -> Any:
        """What `sweep()` has to be given to leave the newest `most`; None if there are no more."""

        def work(statements: Statements) -> Any:
            with statements.connection.cursor() as cursor:
                cursor.execute(
                    f"SELECT kept_until FROM {DELIVERY} ORDER BY kept_until DESC "
                    f"LIMIT 1 OFFSET {int(most)}"
                )
                found = cursor.fetchone()
                return None if found is None else found[0]

        return self.run("sweeping of deliveries", None, work)


def _sweep(statements: Statements, until: Any) -> int:
    with statements.cursor(atomic=False) as cursor:
        over = f"kept_until <= {statements.now if until is None else '%(until)s'}"
        cursor.execute(
            f"SELECT nonce FROM {DELIVERY} d WHERE {over} AND {_DEAD.format(now=statements.now)} "
            f"ORDER BY kept_until LIMIT {BATCH}",
            {**statements.times(), "until": until},
        )
        nonces = [nonce for (nonce,) in cursor.fetchall()]
        if not nonces:
            return 0
        inside, given = listed("n", nonces)
        # Once more: a delivery may have begun since.
        cursor.execute(
            f"DELETE FROM {DELIVERY} WHERE nonce IN ({inside}) AND {over}",
            {**given, **statements.times(), "until": until},
        )
        return len(nonces)
