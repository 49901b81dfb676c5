"""A client that only acquires and releases locks, and reports its resource usage."""

import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from django_fencedlock import lock
from django_fencedlock.exceptions import FencedLockError
from django_fencedlock.lease import Lease

from .client import Client
from .history import FAIL, OK, UNKNOWN

#: Seconds between two samples.
PERIOD = 2.0


class LoadedClient(Client):
    """Acquires any of ``locks`` locks, and holds ``holds`` of them at once."""

    def __init__(self, name: str, lab: dict[str, Any]) -> None:
        super().__init__(name, lab)
        self._locks, self._holds = lab["locks_in_all"], lab["holds"]
        self._held: deque[Lease] = deque()
        self._next_sample = 0.0

    def run(self) -> None:
        while not self.end.exists():
            self._sample()
            self._take()
            while len(self._held) >= self._holds:
                self.release(self._held.popleft())
        while self._held:
            self.release(self._held.popleft())
        self._sample(last=True)

    def _take(self) -> None:
        name = f"load:{self.random.randrange(self._locks)}"
        if any(lease.name == name for lease in self._held):
            return
        number = self.scribe.invoke("acquire", name)
        # A client with many locks that waits for one more could cause a deadlock.
        wait = 30 if self._holds == 1 else 0
        try:
            lease = lock(name, ttl=self.ttl, blocking_timeout=wait).acquire()
        except FencedLockError as exc:
            self.scribe.answer(number, UNKNOWN, error=repr(exc))
            return
        if lease is None:
            self.scribe.answer(number, FAIL)
            return
        self.scribe.answer(number, OK, token=lease.token, owner=lease.owner_id)
        self._held.append(lease)

    def _sample(self, last: bool = False) -> None:
        if time.monotonic() < self._next_sample and not last:
            return
        self._next_sample = time.monotonic() + PERIOD
        status = Path("/proc/self/status").read_text()
        number = self.scribe.invoke("sample", "", pid=os.getpid())
        self.scribe.answer(
            number,
            OK,
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=_number(status, "Threads"),
            memory=_number(status, "VmRSS"),
        )


def _number(status: str, what: str) -> int:
    (line,) = [line for line in status.splitlines() if line.startswith(f"{what}:")]
    return int(line.split()[1])
