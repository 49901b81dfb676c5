"""
Compares a history with what is promised.

Tokens make it simple: nothing has to be searched for, every check goes once through the history.
The tables say how strictly their rows are fenced; ``STRICT`` ones let no former holder write.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise, product

from .history import FAIL, OK, UNKNOWN, Entry, History, Operation

SECOND = 1_000_000_000
#: By how much two clocks of a machine may differ while both are read.
EPSILON = SECOND // 50
#: Tables whose writes are refused as soon as a newer grant is recorded; of which none gets lost.
STRICT = ("tally", "plain", "slot", "stock", "reading")
#: Tables that have a fence column.
WITH_TOKEN = ("tally", "gauge")


@dataclass(frozen=True)
class Violation:
    """A promise that was broken: its number in docs/dev/fault_lab.md, and how."""

    promise: str
    text: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.text}"


@dataclass(frozen=True)
class Terms:
    """What may be expected; a waiter has a dead holder's lock within the ttl and the slack."""

    ttl: float
    forgets: bool = False
    slack: float = 5.0


def violations(history: History, terms: Terms) -> list[Violation]:
    return [found for check in CHECKS for found in check(_Index(history), terms)]


class _Index:
    def __init__(self, history: History) -> None:
        self.history = history
        self.grants: dict[str, list[Entry]] = defaultdict(list)
        self.writes: dict[tuple[str, str], list[Entry]] = defaultdict(list)
        for entry in history.trail:
            if entry.kind == "fence":
                self.grants[entry.name].append(entry)
            else:
                self.writes[entry.kind, entry.name].append(entry)
        self.acquired: dict[str, list[Operation]] = defaultdict(list)
        for operation in history.of("acquire", OK):
            self.acquired[operation.name].append(operation)
        self.by_stamp = {each.stamp: each for each in history.of("write")}

    def committed(self) -> Iterator[tuple[Entry, Operation]]:
        for entries in self.writes.values():
            for entry in entries:
                if entry.stamp in self.by_stamp:
                    yield entry, self.by_stamp[entry.stamp]


Check = Callable[[_Index, Terms], Iterator[Violation]]


def unique_tokens(index: _Index, terms: Terms) -> Iterator[Violation]:
    """I1: no token is granted twice under a name, and each is newer than all before."""
    for name, entries in index.grants.items():
        for earlier, later in pairwise(entries):
            # A claim that was sent twice is recorded twice, as MariaDB fires its triggers also
            # for a row that stays as it was.
            again = (later.after, later.stamp) == (earlier.after, earlier.stamp)
            if later.after <= earlier.after and not again:
                yield Violation("I1", f"{name}: token {later.after} recorded after {earlier.after}")
    for name, operations in index.acquired.items():
        seen: dict[int | None, Operation] = {}
        for each in operations:
            other = seen.get(each.token)
            # Readers share a token.
            if other is not None and not (each.shared and other.shared):
                yield Violation(
                    "I1", f"{name}: {each.client} and {other.client} both got token {each.token}"
                )
            seen[each.token] = each


def tokens_rise(index: _Index, terms: Terms) -> Iterator[Violation]:
    """I2: of two grants one after the other, the later has the higher token, unless both read."""
    for name, operations in index.acquired.items():
        by_end = sorted(operations, key=_end)
        highest = _running_highest(by_end)
        ends = [_end(each) for each in by_end]
        for each in operations:
            place = bisect_left(ends, each.begun)
            if place and highest[place - 1] >= _token(each) + each.shared:
                yield Violation(
                    "I2",
                    f"{name}: {each.client} got token {each.token}, asked for after token "
                    f"{highest[place - 1]} was had",
                )


def fences_never_fall(index: _Index, terms: Terms) -> Iterator[Violation]:
    """I3: in the order of the commits, the tokens of a row's writes never go down."""
    for (table, name), entries in index.writes.items():
        if table not in WITH_TOKEN:
            continue
        for earlier, later in pairwise(entries):
            if (later.token or 0) < (earlier.token or 0):
                yield Violation(
                    "I3", f"{table} {name}: a write under {later.token} follows {earlier.token}"
                )


def none_after_newer_grant(index: _Index, terms: Terms) -> Iterator[Violation]:
    """I4: no write is committed whose COMMIT was requested after a newer grant."""
    tops: dict[str, tuple[list[int], list[int]]] = {}
    for name, operations in index.acquired.items():
        by_end = sorted(operations, key=_end)
        tops[name] = [_end(each) for each in by_end], _running_highest(by_end)
    for entry, write in index.committed():
        if entry.kind not in STRICT or write.name not in tops:
            continue
        ends, highest = tops[write.name]
        place = bisect_left(ends, write.begun)
        if place and highest[place - 1] > _token(write):
            yield Violation(
                "I4",
                f"{entry.kind} {write.name}: {write.client} wrote under token {write.token} after "
                f"token {highest[place - 1]} was had",
            )


def none_past_recorded_grant(index: _Index, terms: Terms) -> Iterator[Violation]:
    """I4, by the database's own order: each write is under the newest grant before it."""
    for name, grants in index.grants.items():
        places = [entry.place for entry in grants]
        for table in STRICT:
            for entry in index.writes.get((table, name), []):
                write = index.by_stamp.get(entry.stamp)
                newest = bisect_right(places, entry.place) - 1
                if write is None or newest < 0:
                    continue
                recorded = grants[newest].after, grants[newest].stamp
                if recorded != (write.token, write.recorded_owner):
                    yield Violation(
                        "I4",
                        f"{table} {name}: a write under token {write.token} was committed when "
                        f"{grants[newest].after} was recorded",
                    )


def none_is_lost(index: _Index, terms: Terms) -> Iterator[Violation]:
    """I5: each write builds on what the one before it wrote."""
    for (table, name), entries in index.writes.items():
        for entry in entries if table in STRICT else ():
            if table != "reading" and entry.after != (entry.before or 0) + 1:
                yield Violation(
                    "I5",
                    f"{table} {name}: {entry.after} was written over {entry.before}: "
                    "a write got lost",
                )


def readings_are_current(index: _Index, terms: Terms) -> Iterator[Violation]:
    """I5: what a reader wrote down is the counter, as no writer comes in between."""
    for (table, name), entries in index.writes.items():
        if table != "reading":
            continue
        written = index.writes.get(("stock", name), [])
        places = [entry.place for entry in written]
        for entry in entries:
            before = bisect_right(places, entry.place)
            count = written[before - 1].after if before else 0
            if entry.after != count:
                yield Violation(
                    "I5", f"{table} {name}: {entry.after} was read, when {count} had been written"
                )


def answers_are_true(index: _Index, terms: Terms) -> Iterator[Violation]:
    """I6: a confirmed write is committed once, a rejected one never, and no write is missing."""
    times: dict[str, int] = defaultdict(int)
    for entries in index.writes.values():
        for entry in entries:
            times[entry.stamp] += 1
            if entry.stamp not in index.by_stamp:
                yield Violation("I6", f"{entry.kind} {entry.name}: no client wrote {entry.stamp!r}")
    for write in index.by_stamp.values():
        count = times[write.stamp]
        wrong = (write.outcome == OK and count != 1) or (write.outcome == FAIL and count)
        if wrong or count > 1:
            yield Violation(
                "I6",
                f"{write.table} {write.name}: a write under token {write.token} that was answered "
                f"by {write.outcome!r} was committed {count} times",
            )
    for (table, name), count in index.history.counts.items():
        entries = index.writes.get((table, name), [])
        last = entries[-1].after if entries else 0
        if count != last:
            yield Violation("I6", f"{table} {name}: the counter is {count}, its last write {last}")


def tokens_were_issued(index: _Index, terms: Terms) -> Iterator[Violation]:
    """I7: each writer, and each believed holder, has a recorded grant."""
    recorded = {
        (name, entry.after, entry.stamp)
        for name, entries in index.grants.items()
        for entry in entries
    }
    believed = [each for operations in index.acquired.values() for each in operations]
    for each in [*believed, *(write for _, write in index.committed())]:
        if (each.name, each.token, each.recorded_owner) not in recorded:
            yield Violation(
                "I7", f"{each.name}: token {each.token} of {each.client} was never recorded"
            )
    for entry, write in index.committed():
        if entry.kind in WITH_TOKEN and entry.token != write.token:
            yield Violation(
                "I7",
                f"{entry.kind} {entry.name}: a write under token {write.token} left {entry.token}",
            )


def entering_again_is_no_grant(index: _Index, terms: Terms) -> Iterator[Violation]:
    """I8: a reentrant acquire returns the same token, and its end doesn't release the lock."""
    for each in index.history.of("reenter", OK):
        if each.token != each.outer or each.released:
            yield Violation(
                "I8",
                f"{each.name}: {each.client} entered token {each.outer} again, got {each.token}"
                + (" and lost the outer one by leaving" if each.released else ""),
            )
    for each in index.history.of("inherit", OK):
        yield Violation("I8", f"{each.name}: a child wrote under token {each.token} of its parent")


def the_dead_are_replaced(index: _Index, terms: Terms) -> Iterator[Violation]:
    """I9: a waiter acquires a dead holder's lock within the ttl and some slack."""
    for injection in index.history.injections:
        if injection["what"] != "kill":
            continue
        bound = injection["at"] + int((terms.ttl + terms.slack) * SECOND)
        for name in held_by(index.history, injection["client"], injection["at"]):
            if late := _waited_too_long(index.history, name, injection["at"], bound):
                yield Violation(
                    "I9",
                    f"{name}: {late.client} waited for more than {terms.ttl + terms.slack:g} s "
                    f"from the death of {injection['client']}",
                )


def held_by(history: History, client: str, at: int) -> list[str]:
    mine = [each for each in history.operations if each.client == client]
    released = {each.owner: each.begun for each in mine if each.kind == "release"}
    return [
        each.name
        for each in mine
        if each.kind == "acquire" and each.ok and _end(each) <= at <= released.get(each.owner, at)
    ]


def _waited_too_long(history: History, name: str, since: int, bound: int) -> Operation | None:
    asked = [each for each in history.of("acquire") if each.name == name]
    if any(each.ok and since <= _end(each) <= bound for each in asked):
        return None
    for each in asked:
        if each.begun <= since and each.outcome in (OK, FAIL) and _end(each) > bound:
            return each
    return None


def former_holders_change_nothing(index: _Index, terms: Terms) -> Iterator[Violation]:
    """I10: the service refuses a holder before its expiry only after a newer grant."""
    if terms.forgets:
        return
    for kind in ("verify", "renew"):
        for each in index.history.of(kind, FAIL):
            if each.left > 0 and not each.lost and not _is_overtaken(index, each):
                yield Violation(
                    "I10",
                    f"{each.name}: {kind} of token {each.token} was refused {each.left:.2f} s "
                    "before its end, without a newer grant",
                )


def none_acquires_before_the_end(index: _Index, terms: Terms) -> Iterator[Violation]:
    """I10: a lock is granted only after its holder has released it, died, or let it expire."""
    if terms.forgets:
        return
    released = {each.owner: each.begun for each in index.history.of("release")}
    renewed = {each.owner: each.begun for each in index.history.of("renew", OK)}
    last_seen: dict[str, int] = defaultdict(int)
    for each in index.history.operations:
        last_seen[each.client] = max(last_seen[each.client], each.begun)
    for name, operations in index.acquired.items():
        for earlier, later in _successions(operations):
            came = _end(later)
            since = max(renewed.get(earlier.owner, 0), earlier.begun)
            is_over = came > since + terms.ttl * SECOND - EPSILON
            left = min(released.get(earlier.owner, came + 1), last_seen[earlier.client] + 1)
            if not is_over and _end(earlier) < came < left:
                yield Violation(
                    "I10",
                    f"{name}: {later.client} got token {later.token} "
                    f"{(came - since) / SECOND:.2f} s after {earlier.client} had got or renewed "
                    f"token {earlier.token}, which it still had",
                )


def former_holders_are_not_confirmed(index: _Index, terms: Terms) -> Iterator[Violation]:
    """I10: a former holder is neither confirmed nor renewed."""
    if terms.forgets:
        return
    for kind in ("verify", "renew"):
        for each in index.history.of(kind, OK):
            newer = [
                other
                for other in index.acquired[each.name]
                if _token(other) > _token(each) and _end(other) < each.begun
            ]
            if newer:
                yield Violation(
                    "I10",
                    f"{each.name}: {kind} confirmed token {each.token} of {each.client} when "
                    f"{newer[0].client} had got {newer[0].token}",
                )


def none_is_refused_needlessly(index: _Index, terms: Terms) -> Iterator[Violation]:
    """I12: the newest holder isn't refused as a former one."""
    for each in index.history.of("write", FAIL):
        if each.table in STRICT and each.error == "StaleFence" and not _is_overtaken(index, each):
            yield Violation(
                "I12",
                f"{each.table} {each.name}: {each.client} was refused as stale under token "
                f"{each.token}, without a newer grant",
            )


def _is_overtaken(index: _Index, operation: Operation) -> bool:
    """Whether a newer grant may have been under way when `operation` was answered."""
    end = operation.ended or 0
    newer = [entry for entry in index.grants[operation.name] if entry.after > _token(operation)]
    known = {each.owner: each for each in index.acquired[operation.name]}
    return any(entry.stamp not in known or known[entry.stamp].begun < end for entry in newer)


def takeovers(history: History) -> int:
    count = 0
    for name in {each.name for each in history.operations}:
        granted = [each for each in history.of("acquire", OK) if each.name == name]
        released = {each.owner: each.begun for each in history.of("release") if each.name == name}
        overtaken = {
            earlier.owner
            for earlier, later in _successions(granted)
            if earlier.client != later.client
            and _end(later) < released.get(earlier.owner, _end(later) + 1)
        }
        count += len(overtaken)
    return count


def _successions(operations: list[Operation]) -> Iterator[tuple[Operation, Operation]]:
    """Yield each grant with those of the next token, unless both are of readers."""
    groups = [list(group) for _, group in groupby(sorted(operations, key=_token), _token)]
    for earlier, later in pairwise(groups):
        for pair in product(earlier, later):
            if not all(each.shared for each in pair):
                yield pair


def refusals(history: History) -> int:
    return len(history.of("write", FAIL))


def _end(operation: Operation) -> int:
    assert operation.ended is not None
    return operation.ended


def _token(operation: Operation) -> int:
    return operation.token or 0


def _running_highest(operations: list[Operation]) -> list[int]:
    highest: list[int] = []
    for each in operations:
        highest.append(max(_token(each), highest[-1] if highest else 0))
    return highest


CHECKS: tuple[Check, ...] = (
    unique_tokens,
    tokens_rise,
    fences_never_fall,
    none_after_newer_grant,
    none_past_recorded_grant,
    none_is_lost,
    readings_are_current,
    answers_are_true,
    tokens_were_issued,
    entering_again_is_no_grant,
    the_dead_are_replaced,
    former_holders_change_nothing,
    none_acquires_before_the_end,
    former_holders_are_not_confirmed,
    none_is_refused_needlessly,
)


def facts(history: History) -> dict[str, int]:
    messages = [each.name for each in history.of("deliver")]
    return {
        "grants": len(history.of("acquire", OK)),
        "writes": len(history.of("write", OK)),
        "unknown": sum(
            each.outcome == UNKNOWN and each.ended is not None for each in history.operations
        ),
        "injections": len(history.injections),
        "takeovers": takeovers(history),
        "refusals": refusals(history),
        "readers": sum(each.shared for each in history.of("acquire", OK)),
        "refused readers": sum(each.shared for each in history.of("write", FAIL)),
        "redelivered": len(messages) - len(set(messages)),
        "inherits": len(history.of("inherit", OK, FAIL)),
    }
