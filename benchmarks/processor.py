"""What processes have computed, which other programs don't blur as they do the clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


def computed(roots: Iterable[int]) -> float:
    """The CPU seconds so far of processes and of all that they started, where they still run."""
    return sum(by_itself(pid) for root in roots for pid in _family(root))


def by_itself(pid: int) -> float:
    """The CPU seconds so far of one process."""
    return _of_threads(pid) / 1e9


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            for child in (task / "children").read_text().split():
                yield from _family(int(child))


def _of_threads(pid: int) -> int:
    spent = 0
    for schedstat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):
            spent += int(schedstat.read_text().split()[0])
    return spent
