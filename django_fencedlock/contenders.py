"""Who of this process waits for a lock, for others to see."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from .backends.base import Request
from .conf import AliasConfig
from .fences import contenders as table
from .fences.contenders import Wait
from .fences.records import Statements
from .lease import clock
from .scribe import Page, Scribe, scribe

#: Seconds after which a wait is worth a row, and after which the row is written again.
WORTH, AGAIN = 1.0, 10.0
#: So many waits are noted, and so many rows are written at once.
MOST, AT_ONCE = 1000, 100


@dataclass(slots=True)
class _Waiting:
    request: Request
    config: AliasConfig
    since: float
    written_at: float | None = None

    def is_due(self, now: float) -> bool:
        if self.written_at is None:
            return now >= self.since + WORTH
        return now >= self.written_at + AGAIN


class Contenders:
    """Those of one process who wait. One gets a row only if he waits for long."""

    def __init__(self, scribe: Scribe) -> None:
        self._scribe = scribe
        self.forget()

    def forget(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        #: Databases, and the owners to take out there.
        self._over: deque[tuple[str, str]] = deque(maxlen=MOST)

    def is_empty(self) -> bool:
        return not self._waiting and not self._over

    @contextlib.contextmanager
    def noted(self, request: Request, config: AliasConfig) -> Iterator[None]:
        """Note a wait, which the block is."""
        if self._scribe.is_quiet() or len(self._waiting) >= MOST:
            yield
            return
        owner = request.owner.id
        self._waiting[owner] = mine = _Waiting(request, config, clock())
        self._scribe.rouse()
        try:
            yield
        finally:
            self._waiting.pop(owner, None)
            if mine.written_at is not None:
                self._over.append((config.fence_database, owner))

    def pages(self) -> Iterator[Page]:
        yield from self._cleared()
        now = clock()
        due = [each for each in list(self._waiting.values()) if each.is_due(now)][:AT_ONCE]
        for database in {each.config.fence_database for each in due}:
            mine = [each for each in due if each.config.fence_database == database]
            for each in mine:
                each.written_at = now
            yield Page(database, partial(_write, mine))
        # Those whose wait ended while they were written.
        yield from self._cleared()

    def _cleared(self) -> Iterator[Page]:
        over = [self._over.popleft() for _ in range(min(AT_ONCE, len(self._over)))]
        for database in {database for database, _ in over}:
            owners = [owner for its, owner in over if its == database]
            yield Page(database, partial(_clear, owners))


def _write(waits: list[_Waiting], statements: Statements) -> None:
    rows = []
    for each in waits:
        owner, waited = each.request.owner, clock() - each.since
        rows.append(Wait(owner.id, each.request.name, each.config.alias, str(owner), waited))
    table.write(statements, rows)


def _clear(owners: list[str], statements: Statements) -> None:
    table.clear(statements, owners)


contenders = Contenders(scribe)
scribe.books.append(contenders)
