"""
The SQL that deletes rows of the registry whose locks expired long ago.

A process that is killed deletes no row. One whose name is never locked again would stay for good.
"""

from __future__ import annotations

from .dialect import BATCH, HELD, NameAndOwner, batches
from .records import Records, Statements

#: Seconds for which an expired row is kept, so that the admin can show it.
KEPT = 3600.0

#: A session lock lives as long as its session, whatever its row says.
_NO_SESSION = "NOT EXISTS (SELECT 1 FROM pg_stat_activity a WHERE a.pid = session_pid)"


class ExpiredRows(Records):
    """The rows of one fence database, of every alias."""

    def sweep(self, batches: int) -> int:
        """Delete those that expired `KEPT` seconds ago; returns how many."""
        return self.in_batches("sweeping of held locks", batches, _sweep)


def _sweep(statements: Statements) -> int:
    over = f"expires_at <= {statements.later('kept')}"
    if statements.returns_rows:
        over += f" AND {_NO_SESSION}"
    with statements.cursor(atomic=False) as cursor:
        given = statements.times(kept=-KEPT)
        cursor.execute(f"SELECT name, owner FROM {HELD} WHERE {over} LIMIT {BATCH}", given)
        found = [NameAndOwner(name, owner) for name, owner in cursor.fetchall()]
        for names, owners, rows in batches(found):
            # With the condition once more: a row may have been renewed since.
            cursor.execute(
                f"DELETE FROM {HELD} WHERE name IN ({names}) AND owner IN ({owners}) AND {over}",
                {**rows, **given},
            )
        return len(found)
