"""Has Celery see at once that a child was killed, which by itself takes it up to five seconds."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ..lease import clock

#: Seconds between two looks: Celery gives up a pool whose children die a hundred times a second.
APART = 1.0
#: Seconds in which the dead child's locks are freed first, before its successor is forked.
FIRST = 0.05


class Mender:
    """
    Rung by a thread, it answers in the loop of the main thread, where alone the pool may be mended.

    Celery does the same on a timer; nothing is lost if a ring goes astray.
    """

    def __init__(self) -> None:
        self._ear, self._hand = os.pipe()
        for end in (self._ear, self._hand):
            os.set_blocking(end, False)
        self._last = self._planned = float("-inf")

    def ring(self) -> None:
        # If it is full, it is full of rings that weren't answered yet.
        with contextlib.suppress(BlockingIOError):
            os.write(self._hand, b"!")

    def listen(self, pool: Any, hub: Any) -> None:
        """Answer in this loop from now on."""
        hub.add_reader(self._ear, self._answer, pool, hub)

    def _answer(self, pool: Any, hub: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._ear, 4096)
        now = clock()
        if self._planned < now:
            self._planned = max(now + FIRST, self._last + APART)
            hub.call_later(self._planned - now, self._mend, pool)

    def _mend(self, pool: Any) -> None:
        self._last = clock()
        pool.maintain_pool()
