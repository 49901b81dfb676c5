"""The grants of a set: all of its locks, or none, and no two sets that wait for each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from django.db import Error

from ..backends.interface import Claim, Grant, Granted, Held, Wait, grant_of
from ..exceptions import BackendUnavailable, FencedLockError, LockNotAcquired
from ..lease import Lease, Leases
from ..storage.records import raise_if_tables_missing
from .grants import Grants, holder_of
from .identity import Holder, LocalHolder, new_owner_id
from .keeper import BEATS, Keeper

#: How many holders the error of a refusal names.
SHOWN = 4


class Control(Protocol):
    """The service of the set's alias."""

    grants: Grants
    keeper: Keeper

    def let_go(self, leases: Leases) -> list[bool]: ...
    def lease_of(self, name: str, who: LocalHolder) -> Lease | None: ...


class SetAcquire:
    """
    One acquire of a set of locks.

    It tries all of them without waiting. While it waits for one that is held, it has only names
    that are sorted below that one: of several sets that wait for each other's locks, one always
    goes on. The keeper renews what it has meanwhile.
    """

    def __init__(
        self,
        control: Control,
        claims: Sequence[Claim],
        wait: Wait,
        who: LocalHolder,
        hold: Callable[[Grant, float], Lease],
        of_another_process: bool = False,
    ) -> None:
        self._control, self._grants, self._keeper = control, control.grants, control.keeper
        self._backend = control.grants.backend
        #: By name, in the order of the names.
        self._claims = {claim.name: claim for claim in claims}
        self._wait, self._who, self._hold = wait, who, hold
        self._of_another_process = of_another_process
        self.held: dict[str, Lease] = {}
        #: What the service may have granted, and isn't held yet.
        self._asked: list[Grant] = []

    def run(self) -> dict[str, Held]:
        """Return who holds each lock that was refused; if there is none, all are held."""
        try:
            while missing := self._missing():
                refused = self._try(missing)
                if refused and self._wait.left > 0:
                    refused = self._wait_for_one(refused)
                elif not refused and not self._wait.left:
                    # Some may have been lost meanwhile, and the time is over.
                    refused = dict.fromkeys(self._missing(), Held())
                if refused:
                    self._let_go(list(self.held.values()))
                    return refused
        except BaseException:
            self._undo()
            raise
        return {}

    def _missing(self) -> list[str]:
        # The keeper may not have noticed yet that one has expired.
        self._let_go([lease for lease in self.held.values() if lease.lost or lease.expired])
        return [name for name in self._claims if name not in self.held]

    def _try(self, names: Sequence[str]) -> dict[str, Held]:
        """Acquire all these locks, or none; return who holds those that were refused."""
        claims = [self._claims[name] for name in names]
        sent, is_recorded = self._grants.prepare(claims, self._wait, self._of_another_process)
        while True:
            self._asked = [grant_of(claim) for claim in claims]
            try:
                answer = self._backend.acquire_all(sent)
            except BackendUnavailable as exc:
                # The service may carry the claims out later on.
                for grant in self._asked:
                    self._keeper.doubt(grant)
                self._asked = []
                raise_if_tables_missing(exc, self._backend.config.fence_database)
                raise
            if isinstance(answer, list):
                refused = self._confirm(claims, answer, is_recorded)
                self._asked = []
                return refused
            self._asked = []
            if refused := self._note(answer):
                return refused

    def _note(self, refusals: dict[str, Held]) -> dict[str, Held]:
        """Evict holders whose processes are gone; return the refusals by the others."""
        refused = {}
        for name, held in refusals.items():
            claim = self._claims[name]
            if self._grants.evict(claim, held):
                continue
            refused[name] = held
            is_first, self._wait.held = self._wait.held is None, held
            self._grants.refuse_to_wait_for_caller(claim, self._wait, self._who)
            if is_first:
                self._wait.refused(held)
        return refused

    def _confirm(
        self, claims: Sequence[Claim], answers: Sequence[Granted], is_recorded: bool
    ) -> dict[str, Held]:
        """Record grants in one statement, and hold them up to the first that isn't recorded."""
        recorded = set() if is_recorded else self._record(claims, answers)
        pairs = list(zip(claims, answers, strict=True))
        for place, (claim, granted) in enumerate(pairs, 1):
            done = is_recorded or claim.name in recorded
            if found := self._grants.confirm(claim, granted, done):
                self.held[claim.name] = self._hold(*found)
                continue
            # Not the rest: each of them may wait for a transaction as well.
            if rest := [grant_of(*pair) for pair in pairs[place:]]:
                self._backend.release_all(rest)
            for grant in rest:
                self._keeper.clear_row(grant)
            for each in claims[place - 1 :]:
                self._renew_owner(each.name)
            return {claim.name: Held()}
        return {}

    def _record(self, claims: Sequence[Claim], answers: Sequence[Granted]) -> set[str]:
        """Record the grants that have tokens; return their names, less those that are pinned."""
        now, config = self._wait.now(), self._backend.config
        pairs = zip(claims, answers, strict=True)
        # A grant that took long is renewed first, and recorded by itself. So is a reader's, whose
        # token other readers share.
        fresh = [pair for pair in pairs if now < pair[1].since + pair[0].ttl / BEATS]
        grants = [grant_of(*pair) for pair in fresh if pair[0].fenced and not pair[0].shared]
        numbered = [grant for grant in grants if grant.token is not None]
        if not numbered:
            return set()
        try:
            return self._grants.fences.record_all(numbered)
        except Error as exc:
            if not self._grants.fences.is_row_locked(exc):
                name = numbered[0].name
                doing = f"record {len(numbered)} grants of {config.alias!r}, the first one of"
                raise self._backend.unavailable(doing, exc, name) from exc
            return set()

    def _wait_for_one(self, refused: dict[str, Held]) -> dict[str, Held]:
        """Wait for the lowest of the refused names, while holding names below it alone."""
        names = list(self._claims)
        while refused:
            lowest = min(map(names.index, refused))
            below = names[:lowest]
            self._let_go([lease for name, lease in self.held.items() if name not in below])
            missing = [name for name in below if name not in self.held]
            refused = self._try(missing) if missing else {}
        claim = self._claims[names[lowest]]
        self._asked = [grant_of(claim)]
        try:
            answer = self._grants.acquire(claim, self._wait, self._who, self._of_another_process)
            if not isinstance(answer, Held):
                self.held[claim.name] = self._hold(*answer)
        except FencedLockError:
            self._asked = []
            raise
        self._asked = []
        return {claim.name: answer} if isinstance(answer, Held) else {}

    def _let_go(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            del self.held[lease.name]
            self._renew_owner(lease.name)
        if leases:
            self._control.let_go(leases)
        for lease in leases:
            lease.released = True

    def _renew_owner(self, name: str) -> None:
        # What is still done for the former grant, such as deleting its row, must not hit the next.
        self._claims[name] = self._claims[name]._replace(owner=new_owner_id())

    def _undo(self) -> None:
        """Release what was acquired, and what may have been: an exception ends the acquire."""
        # An interrupt may have hit between its registration and the note of it.
        found = (self._control.lease_of(name, self._who) for name in self._claims)
        held = {lease.owner_id: lease for lease in (*found, *self.held.values()) if lease}
        rest = [grant for grant in self._asked if grant.owner not in held]
        for grant in rest:
            self._keeper.doubt(grant)
        with contextlib.suppress(BackendUnavailable, RuntimeError):
            if rest:
                self._backend.release_all(rest)
                for grant in rest:
                    self._keeper.clear_row(grant)
        with contextlib.suppress(BackendUnavailable, RuntimeError):
            if held:
                self._control.let_go(list(held.values()))
        for lease in held.values():
            lease.released = True


def refusal(
    grants: Grants, names: Sequence[str], waited: float, fenced: bool, refused: dict[str, Held]
) -> LockNotAcquired:
    """Return the error that says who has the locks of a set that are taken."""
    alias = grants.backend.config.alias
    with contextlib.suppress(BackendUnavailable):
        # A service may have stopped at the first one.
        refused = {**refused, **grants.backend.holders(names)}
    holders: dict[str, Holder | None] = {
        name: holder_of(refused[name], alias) if refused[name].owner else None
        for name in names
        if name in refused
    }
    first = next(iter(holders))
    if len(holders) == 1:
        error = grants.refusal(first, waited, fenced, refused[first])
        error.holders = {first: error.holder}
        return error
    listed = [f"{name!r} by {holder or 'an unknown holder'}" for name, holder in holders.items()]
    if len(listed) > SHOWN:
        listed[SHOWN:] = [f"{len(listed) - SHOWN} more"]
    return LockNotAcquired(
        f"{len(holders)} locks of a set of {len(names)} are held: {'; '.join(listed)}. "
        f"Waited {waited:.1f} s for them.",
        name=first,
        alias=alias,
        holder=holders[first],
        holders=holders,
    )
