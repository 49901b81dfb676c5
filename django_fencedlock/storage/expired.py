"""
Delete rows of the registry whose locks expired long ago.

A process that is killed deletes no row. One whose name is never locked again would stay for ever.
"""

from __future__ import annotations

from django.db import connections

from .records import Records, ServerTime

#: Seconds for which an expired row is kept, so that the admin can show it.
KEPT = 3600.0

#: A session lock lives as long as its session, whatever its row says.
_NO_SESSION = "NOT EXISTS (SELECT 1 FROM pg_stat_activity a WHERE a.pid = session_pid)"


class ExpiredRows(Records):
    """The rows of one fence database, of every alias."""

    def sweep(self, batches: int) -> int:
        """Delete those that expired `KEPT` seconds ago; return how many."""

        old = self.rows("HeldLock").filter(expires_at__lte=ServerTime(-KEPT))
        if connections[self.using].vendor == "postgresql":
            old = old.extra(where=[_NO_SESSION])
        return self.delete("sweeping of held locks", old, batches)
