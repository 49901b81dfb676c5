"""Locks as cells: one record a lock, compared and set, with an expiry of its own."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from .interface import Backend, Claim, Granted, Held, Wait


class CellBackend(Backend):
    """
    The recipe for services that compare and set. The core polls, with jitter.

    What asks the service raises one of `errors` within the timeout.
    """

    #: What the service raises if it doesn't answer.
    errors: ClassVar[tuple[type[Exception], ...]]

    @abstractmethod
    def take(self, claim: Claim) -> Granted | Held:
        """Set the cell to the owner if it is free, expired, or the owner's."""

    def acquire(self, claim: Claim, wait: Wait) -> Granted | Held:
        with self._asking("acquire", claim.name):
            # A refused write costs more than a look, and delays the holder's renewals.
            if wait.held is not None and (held := self.holders([claim.name]).get(claim.name)):
                return held
            return self.take(claim)

    @contextlib.contextmanager
    def _asking(self, doing: str, name: str | None = None) -> Iterator[None]:
        """Raise `BackendUnavailable` for an error of the service."""
        try:
            yield
        except self.errors as exc:
            raise self.unavailable(doing, exc, name) from exc
