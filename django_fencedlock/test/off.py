"""A backend that asks nobody, for tests to which locks don't matter."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from ..backends.base import Backend, Grant, Renewal, Request
from ..conf import AliasConfig
from ..lease import Lease, clock
from ..owners import Holder

PATH = f"{__name__}.NoService"


class NoService(Backend):
    """Grants every lock to everybody at once. Tokens rise, but nothing is recorded."""

    label = "off"

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        self._mutex = threading.Lock()
        self._tokens: Counter[str] = Counter()
        self._gone: set[str] = set()

    def acquire(self, request: Request) -> Grant:
        since = clock()
        if not request.fenced:
            return Grant(None, since)
        with self._mutex:
            self._tokens[request.name] += 1
            return Grant(self._tokens[request.name], since)

    def is_free(self, name: str) -> bool:
        return True

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        return [Renewal.KEPT if self.verify(lease) else Renewal.LOST for lease in leases]

    def verify(self, lease: Lease) -> bool:
        return lease.owner not in self._gone

    def release(self, lease: Lease) -> bool:
        held = self.verify(lease)
        self._gone.add(lease.owner)
        return held

    def holder(self, name: str) -> Holder | None:
        return None
