"""The clock of a lock service that tells its time with each answer."""

from __future__ import annotations

import math
from email.utils import mktime_tz, parsedate_tz

#: Seconds by which a clock may drift in a second. Linux corrects its own no faster.
DRIFT = 0.0005


class ServiceClock:
    """
    The service's time: what the `Date` headers of its answers say, and no machine's wall clock.

    An answer is made between its request and its arrival, within the second of its `Date`. That
    bounds the difference of the two clocks, to some milliseconds after many answers. A lease ends
    by the latest possible time, and another owner takes its lock by the earliest.
    """

    def __init__(self) -> None:
        #: The difference's bounds, and when they were found. Threads share it: replaced as a whole.
        self._found = -math.inf, math.inf, 0.0

    @property
    def is_known(self) -> bool:
        return self._found[1] < math.inf

    def bounds(self, now: float) -> tuple[float, float]:
        """Return the earliest and the latest time that the service's clock may show."""
        low, high, at = self._found
        drift = DRIFT * max(0.0, now - at)
        return now + low - drift, now + high + drift

    def hear(self, sent: float, received: float, date: str | None) -> None:
        """Note an answer by its header, if it has one."""
        if parsed := parsedate_tz(date):
            self.learn(sent, received, mktime_tz(parsed))

    def learn(self, sent: float, received: float, date: float) -> None:
        """Note an answer; `sent` and `received` are of the local clock."""
        low, high = date, date + 1 + received - sent
        earliest, latest = self.bounds(received)
        if low <= latest and earliest <= high:
            low, high = max(low, earliest), min(high, latest)
        else:
            # A clock was set, or this one answer is wrong: the next one decides.
            low, high = min(low, earliest), max(high, latest)
        self._found = low - received, high - received, received
