"""What happened in a run, in order, for whoever asks or waits for more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

#: Of a long play, the beginning is forgotten.
MOST = 2000
#: What may come before a run begins: processes start, which takes a moment.
PRELUDE = ("starting", "ready")


class Log:
    """
    Events of one run; each gets a number, and its time in seconds since the run began:
    since something other happened than that processes started.

    Its condition guards all that belongs to the run.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._began: float | None = None
        self._events: list[dict[str, Any]] = []
        self._next = 1
        #: Raised by whatever changes, an event or a state. Who knows nothing yet knows 0.
        self.version = 1

    def now(self) -> float:
        """Seconds since the run began; 0 before that."""
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
        """Say that something changed."""
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
