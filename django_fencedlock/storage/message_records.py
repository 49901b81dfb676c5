"""
`MessageRecord`: which messages were begun, and how they ended.

The end is recorded before the lock is released, and looked up after the lock was acquired. So the
holder of the lock sees every end before its own run.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.db import IntegrityError
from django.db.models import BooleanField, Exists, ExpressionWrapper, F, OuterRef, Q, Value

from .records import MessageTime, Records, ServerTime, fetch, insert, private_query, rows_of
from .text import in_ascii

#: Seconds after which an end is past: the worker has stored the result, or never will.
SETTLED = 10.0


@dataclass(frozen=True, slots=True)
class Message:
    """One delivery of a message."""

    nonce: str
    #: Of the lock, and of the run of this delivery.
    name: str
    owner: str
    task_id: str
    #: For how many seconds the record is kept, from its last change.
    kept: float


@dataclass(frozen=True, slots=True)
class Begun:
    """What is known of a message when a delivery of it begins."""

    tries: int
    #: How an earlier delivery ended; empty if none did.
    outcome: str
    #: Whether it ended more than a moment ago.
    is_past: bool = False
    #: The owner id of the newest delivery's run.
    owner: str = ""

    @property
    def is_first(self) -> bool:
        return self.tries == 1 and not self.outcome


def begin(using: str, message: Message, former: str | None = None) -> Begun:
    """Do what `MessageRecords.begin()` does, as a part of another query."""
    # A sweep may delete a row that is there before it is read.
    for _ in range(2):
        if insert(
            using,
            "MessageRecord",
            nonce=message.nonce,
            name=message.name,
            owner=message.owner,
            # For people only.
            task_id=in_ascii(message.task_id)[:100],
            tries=1,
            began_at=MessageTime(),
            finished_at=Value(None),
            outcome="",
            kept_until=ServerTime(message.kept),
        ):
            return Begun(1, "", owner=message.owner)
        # Not again for the same run, which may come twice if an answer was lost.
        unfinished = rows_of("MessageRecord", using).filter(nonce=message.nonce, outcome="")
        others = unfinished.exclude(owner=message.owner)
        if former is not None:
            others = others.filter(owner=former)
        others.update(
            tries=F("tries") + 1, owner=message.owner, kept_until=MessageTime(message.kept)
        )
        if found := _newest(using, message):
            return found
    raise IntegrityError(f"message {message.nonce!r} has a record that can't be read")


def _newest(using: str, message: Message) -> Begun | None:
    is_past = Q(finished_at__lte=ServerTime(-SETTLED))
    rows = rows_of("MessageRecord", using).filter(nonce=message.nonce)
    rows = rows.annotate(is_past=ExpressionWrapper(is_past, BooleanField()))
    for row in fetch(rows, "owner", "tries", "outcome", "is_past"):
        return Begun(row.tries, row.outcome, bool(row.is_past), row.owner)
    return None


class MessageRecords(Records):
    """The messages of one alias."""

    @private_query("record the beginning of a delivery")
    def begin(self, message: Message, former: str | None = None) -> Begun:
        """
        Record that a delivery begins, unless an earlier one has ended.

        Args:
            former: Only after a delivery of this owner; two may have a permit at the same time.
        """
        return begin(self.using, message, former)

    @private_query("record the end of a delivery")
    def finish(self, message: Message, outcome: str) -> bool:
        """Record the outcome; False if another delivery has begun since, or ended."""
        mine = self.rows("MessageRecord").filter(nonce=message.nonce, outcome="")
        return bool(
            mine.filter(owner=message.owner).update(
                finished_at=MessageTime(), outcome=outcome, kept_until=ServerTime(message.kept)
            )
        )

    @private_query("look up a delivery")
    def newest(self, message: Message) -> Begun | None:
        """Return what is known of the message; None if no delivery of it began."""
        return _newest(self.using, message)

    def sweep(self, batches: int) -> int:
        """Delete records kept until now, except of active runs; return how many."""
        live = self.rows("HeldLock").filter(
            name=OuterRef("name"), owner=OuterRef("owner"), expires_at__gt=ServerTime()
        )
        old = self.rows("MessageRecord").filter(~Exists(live), kept_until__lte=ServerTime())
        return self.delete("delete old deliveries", old.order_by("kept_until"), batches)
