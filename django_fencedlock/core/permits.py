"""Permits: any free one of the N locks of a name."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from collections.abc import Mapping
from functools import partial

from django.db import connections

from ..backends.interface import Claim, Grant, Held, Wait
from ..exceptions import BackendUnavailable, LockNotAcquired
from ..lease import current_lease
from ..storage.connections import is_of_test
from ..storage.fences import pinned_by
from .grants import BRIEFLY, FIRST_PAUSE, LONGEST_PAUSE, Grants, holder_of
from .identity import Holder, LocalHolder
from .names import SHOWN, permit_name, read_permit

#: Seconds that a waiter spends in the queue of one permit before it moves on to the next.
TURN = 1.0
#: Names whose last released permit is remembered.
MAX_NAMES = 1024


class Permits:
    """
    Gets the permits of one alias.

    Each is a lock of its own, with its own fence. There is no counter, which would be wrong after
    a holder's death. Of callers with different limits, the largest limit bounds the holders.
    """

    def __init__(self, grants: Grants) -> None:
        self._grants = grants
        #: By name, the permit that this process released last: it is likely to be free.
        self._released: dict[str, int] = {}

    def acquire(
        self,
        claim: Claim,
        wait: Wait,
        who: LocalHolder | None = None,
        of_another_process: bool = False,
    ) -> tuple[Grant, float] | Held:
        """As `Grants.acquire()`, for any permit of the claim's name."""
        search = _Search(self._grants, claim, wait, who, of_another_process)
        number = self._released.pop(claim.name, 0)
        if not 1 <= number <= search.limit:
            number = random.randint(1, search.limit)
        answer = search.ask(permit_name(claim.name, number))
        return search.run() if isinstance(answer, Held) else answer

    def note_free(self, grant: Grant) -> None:
        """Let the next acquire begin with a permit that this process no longer holds."""
        if permit := read_permit(grant.name):
            if len(self._released) >= MAX_NAMES:
                self._released.clear()
            self._released[permit[0]] = permit[1]

    def holder(self, claim: Claim) -> Holder | None:
        """Ask the service for one of the holders; None if a permit is free."""
        found = [*self._grants.look_up(names_of(claim)).values()]
        is_free = len(found) < (claim.permits or 0)
        return None if is_free else holder_of(found[0], self._grants.backend.config.alias)

    def refusal(self, claim: Claim, waited: float) -> LockNotAcquired:
        """Return the error that says who has the permits."""
        config, names = self._grants.backend.config, names_of(claim)
        found: Mapping[str, Held] = {}
        with contextlib.suppress(BackendUnavailable):
            found = self._grants.look_up(names)
        holders = [holder_of(held, config.alias) for held in found.values()]
        count, why = "All", ""
        free = [name for name in names if name not in found]
        if (
            free
            and claim.fenced
            and (blocker := pinned_by(config.fence_database, free[0], BRIEFLY))
        ):
            count = f"{len(found)} of"
            why = f" The next grant of {free[0]!r} has to wait for {blocker}."
        more = f"; and {len(holders) - SHOWN} more" if len(holders) > SHOWN else ""
        by = "; ".join(map(str, holders[:SHOWN])) or "unknown holders"
        return LockNotAcquired(
            f"{count} {len(names)} permits of lock {claim.name!r} are held, by {by}{more}.{why} "
            f"Waited {waited:.1f} s.",
            name=claim.name,
            alias=config.alias,
            holder=holders[0] if holders else None,
            holders={
                name: holder if holder.owner_id else None
                for name, holder in zip(found, holders, strict=True)
            },
        )


class _Search:
    """One acquire of any permit."""

    def __init__(
        self,
        grants: Grants,
        claim: Claim,
        wait: Wait,
        who: LocalHolder | None,
        of_another_process: bool,
    ) -> None:
        self._grants, self._claim, self._wait = grants, claim, wait
        self._more = who, of_another_process
        self._tell = wait.refused
        self.limit = claim.permits or 1
        #: The wait at one permit.
        self._turn: list[Wait] = []
        #: The holders by the last look, by the permit's name.
        self._held: dict[str, Held] = {}

    def ask(self, name: str, seconds: float = 0.0) -> tuple[Grant, float] | Held:
        """Try one permit, or wait in its queue for some seconds."""
        wait, one = self._wait, self._claim._replace(name=name)
        # Also without a queue, it isn't a try that gives up early: the caller may wait.
        turn = Wait(wait.seconds, since=-math.inf, required=wait.required)
        if seconds:
            # First it can be cancelled, then it is as long as the caller's.
            turn = Wait(cancelled_by=wait.cancelled_by, required=wait.required)
            self._turn[:] = [turn]
            turn.seconds = min(seconds, wait.left)
        # What an exception from outside releases.
        wait.asked = (one,)
        return self._grants.acquire(one, turn, *self._more)

    def run(self) -> tuple[Grant, float] | Held:
        """Try every free permit; wait while none is free."""
        grants, wait = self._grants, self._wait
        home = connections[grants.backend.config.fence_database]
        if home.in_atomic_block and is_of_test(home):
            # Only this very thread could release a permit.
            wait.seconds = 0.0
        # The wait outlives this, and nothing may refer to the holder then.
        wait.on_cancel(partial(_cancel, self._turn))
        names, pause = names_of(self._claim), FIRST_PAUSE
        if grants.backend.supports_any:
            return self._run_any(names)
        random.shuffle(names)
        # A permit of the code that called this may never be released.
        queues = itertools.cycle([n for n in names if not current_lease(n)] or names)
        while True:
            for name in self._look(names):
                if not isinstance(answer := self.ask(name), Held):
                    return answer
            self._note_refusal(names)
            if not wait.left:
                return wait.held or Held()
            if not grants.backend.supports_waiting:
                time.sleep(min(wait.left, pause * random.uniform(0.5, 1.5)))
                pause = min(LONGEST_PAUSE, pause * 1.5)
                if wait.cancelled:
                    return wait.held or Held()
            elif not isinstance(answer := self.ask(next(queues), TURN), Held):
                return answer

    def _run_any(self, names: list[str]) -> tuple[Grant, float] | Held:
        """Let the service find a free permit, or queue for the first that is released."""
        wait = self._wait
        wait.asked = claims = [self._claim._replace(name=name) for name in names]

        def note(held: Held) -> None:
            if not self._look(names):
                self._note_refusal(names)

        note(Held())
        wait.refused = note
        try:
            return self._grants.acquire_any(claims, wait)
        finally:
            wait.refused = self._tell

    def _look(self, names: list[str]) -> list[str]:
        """Return the free permits, with those of dead holders, which are evicted."""
        claim, found = self._claim, self._grants.look_up(names)
        self._held = {
            name: held
            for name, held in found.items()
            if not self._grants.evict(claim._replace(name=name), held)
        }
        return [name for name in names if name not in self._held]

    def _note_refusal(self, names: list[str]) -> None:
        """Let the caller know of the holders, once."""
        wait, found = self._wait, [*self._held.values()] or [Held()]
        is_first, wait.held = wait.held is None, found[0]
        if not is_first:
            return
        if all(map(current_lease, names)):
            self._grants.refuse_to_wait_for_caller(
                self._claim._replace(name=names[0]), wait, self._more[0]
            )
        for held in found:
            self._tell(held)


def _cancel(turns: list[Wait]) -> None:
    for turn in turns:
        turn.cancel()


def names_of(claim: Claim) -> list[str]:
    """Return the names of the locks that a claim may get: one, or that of each permit."""
    if claim.permits is None:
        return [claim.name]
    return [permit_name(claim.name, number + 1) for number in range(claim.permits)]
