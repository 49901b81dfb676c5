"""What processes have computed, which other programs don't blur as they do the clock."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
#: The clock of the time that the scheduler gave.
_SCHEDULED = 2


def computed(roots: Iterable[int]) -> float:
    """
    The CPU seconds so far of processes and of all that they started.

    Of those that ended, too: a session of PostgreSQL takes its process along.
    """
    return sum(by_itself(pid) + _of_ended(pid) for root in roots for pid in _family(root))


def by_itself(pid: int) -> float:
    """The CPU seconds so far of one process, with those of its threads that have ended."""
    try:
        # What clock_getcpuclockid() gives for a process: Linux has its number in the clock's.
        return time.clock_gettime(~pid << 3 | _SCHEDULED)
    except OSError:
        return 0.0


def _of_ended(pid: int) -> float:
    """The CPU seconds of the children that a process has buried, to a hundredth."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    # The name in parentheses may hold anything.
    user, system = stat.rpartition(")")[2].split()[13:15]
    return (int(user) + int(system)) / _TICKS


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            for child in (task / "children").read_text().split():
                yield from _family(int(child))
