"""The events of a run, in order, with a condition to wait for more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

#: The number of events that are kept.
MOST = 2000
#: Events before the run begins: processes start, which takes a moment.
PRELUDE = ("starting", "ready")


class Log:
    """
    Events of one run, each with a number and its time in seconds since the run began.

    The run begins with the first event that isn't in `PRELUDE`. The condition guards all
    attributes of the run.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._began: float | None = None
        self._events: list[dict[str, Any]] = []
        self._next = 1
        #: Increased by every event or change of state; a new page begins with 0.
        self.version = 1

    def now(self) -> float:
        """Return the seconds since the run began; 0 before that."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def add(self, events: Iterable[dict[str, Any]]) -> None:
        with self.changed:
            for event in events:
                if self._began is None and event["kind"] not in PRELUDE:
                    self._began = event["at"]
                at = 0.0 if self._began is None else round(event["at"] - self._began, 3)
                self._events.append({**event, "seq": self._next, "at": at})
                self._next += 1
            del self._events[:-MOST]
            self.touch()

    def touch(self) -> None:
        """Wake all that wait for a change."""
        with self.changed:
            self.version += 1
            self.changed.notify_all()

    def after(self, seq: int) -> list[dict[str, Any]]:
        with self.changed:
            return [event for event in self._events if event["seq"] > seq]

    def wait_for(self, condition: Callable[[], Any], seconds: float) -> bool:
        """Wait until something that others change is so."""
        with self.changed:
            return bool(self.changed.wait_for(condition, seconds))
