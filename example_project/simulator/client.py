"""A client: acquires the lock, reads and writes the counter, and releases the lock."""

import sys
from typing import Any

from django.db import Error

from django_fencedlock import LockRequired, StaleFence, lock, signals
from django_fencedlock.backends.interface import Renewal
from django_fencedlock.exceptions import BackendUnavailable
from django_fencedlock.lease import Lease

from .puppet import begin, die_with, obey, say

#: Seconds for which a client waits for the lock.
PATIENCE = 120


class Client:
    """One holder. It runs in one thread, because a lease belongs to its thread."""

    def __init__(self) -> None:
        from .models import COUNTERS, LOCK

        self._counters, self._lock_name = COUNTERS, LOCK
        self._lease: Lease | None = None
        self._value = 0
        signals.leases_renewed.connect(self._renewed)

    def acquire(self, run: str, ttl: float, fencing: str) -> None:
        """Acquire the lock, and read the counter."""
        self._forget()
        self._rows: Any = self._counters[fencing].objects.filter(pk=run)
        wanted = lock(self._lock_name.format(run=run), ttl=ttl, blocking_timeout=PATIENCE)
        try:
            lease = wanted.acquire(blocking=False)
            if lease is None:
                say("waits")
                lease = wanted.acquire()
        except BackendUnavailable as exc:
            say("failed", doing="acquire", message=str(exc))
            return
        if lease is None:
            say("gave_up")
            return
        self._lease = lease
        self._value = self._rows.get().value
        say("acquired", token=lease.token, left=lease.remaining(), value=self._value)
        lease.on_lost(self._lost)

    def write(self) -> None:
        """Write the value read before plus one, however long ago it was read."""
        lease = self._lease
        assert lease is not None
        seen, value = self._value, self._value + 1
        try:
            self._rows.update(value=value)
        except (StaleFence, LockRequired) as exc:
            say("refused", token=lease.token, seen=seen, value=value, message=str(exc))
        except Error as exc:
            say("failed", doing="write", message=str(exc))
        else:
            self._value = value
            say("wrote", token=lease.token, seen=seen, value=value)

    def release(self) -> None:
        """Release the lock."""
        lease, self._lease = self._lease, None
        assert lease is not None
        lease.off_lost(self._lost)
        try:
            had_it = lease.release()
        except BackendUnavailable as exc:
            say("dropped", token=lease.token, message=str(exc))
        else:
            say("released" if had_it else "dropped", token=lease.token, message="")

    def _forget(self) -> None:
        if self._lease is not None:
            self.release()

    def _renewed(self, leases: list[Lease], answers: list[Renewal], **kwargs: Any) -> None:
        for lease, answer in zip(leases, answers, strict=True):
            if answer is Renewal.KEPT:
                say("renewed", token=lease.token, left=lease.remaining())

    def _lost(self, lease: Lease) -> None:
        say("lost", token=lease.token, message=lease.loss().args[0])


def main() -> None:
    die_with(int(sys.argv[1]))
    begin()
    client = Client()
    commands = {"acquire": client.acquire, "write": client.write, "release": client.release}
    obey(commands, at_end=lambda: None)


if __name__ == "__main__":
    main()
