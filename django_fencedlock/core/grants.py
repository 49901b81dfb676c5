"""The core step: a service excludes, the fence database records, and only then code runs."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import conf, logs
from ..backends.interface import (
    SHARED,
    Backend,
    Claim,
    Grant,
    Granted,
    Held,
    Renewal,
    Wait,
    grant_of,
)
from ..exceptions import (
    AliasConflict,
    BackendUnavailable,
    InsideTransaction,
    LockNotAcquired,
    SettingsError,
)
from ..lease import current_lease
from ..storage.connections import (
    has_own_block,
    is_of_test,
    is_open,
)
from ..storage.dialect import Newest
from ..storage.fences import Fences, pinned_by
from ..storage.records import raise_if_tables_missing
from ..storage.vendors import LEDGERS
from .events import Kind, emit
from .identity import (
    Holder,
    LocalHolder,
    Owner,
    describe_identity,
    is_in_call,
    is_process_gone,
    new_owner,
)
from .keeper import BEATS, Keeper
from .names import is_path, read_path

logger = logging.getLogger(__name__)

#: A refused claim is repeated after 10 ms, then after longer pauses, but at least every 250 ms.
#: Each pause is multiplied by a random number between a half and one and a half.
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25
#: How often one grant may be refused by the fence, and given a number again.
ATTEMPTS = 4
#: Seconds to find the reason of a refusal, after a wait.
BRIEFLY = 0.5


class Grants:
    """
    Gets the grants of one alias.

    Each is recorded before it counts: a former holder could write after the new holder has read.
    """

    def __init__(
        self,
        backend: Backend,
        fences: Fences,
        keeper: Keeper,
        clock: Callable[[], float],
        is_free: Callable[[str, str, str, str], bool],
    ) -> None:
        self.backend = backend
        self.fences = fences
        self._keeper = keeper
        self._clock = clock
        #: Whether a name is free at another alias, of this label and fence database.
        self._is_free = is_free
        #: Whether the service is known to be behind, and stays so: it takes no suggestions.
        self._stays_behind = False

    def acquire(
        self,
        claim: Claim,
        wait: Wait,
        who: LocalHolder | None = None,
        of_another_process: bool = False,
    ) -> tuple[Grant, float] | Held:
        """
        Return a recorded grant and the local time that its ttl counts from, or who holds the lock.

        `wait.refused` is called once, after the first refusal, unless the holder was evicted. What
        it raises ends the wait.
        """
        pause, backend, tell = FIRST_PAUSE, self.backend, wait.refused
        (sent,), is_recorded = self.prepare([claim], wait, of_another_process)
        wait.refused = partial(self._note_refusal, claim, wait, who, tell)
        try:
            while True:
                answer = backend.acquire(sent, wait)
                if isinstance(answer, Granted):
                    if found := self.confirm(claim, answer, is_recorded):
                        return found
                    answer = Held()
                elif wait.refused(answer):
                    # The holder was evicted.
                    continue
                elif backend.supports_waiting:
                    return answer
                if not wait.left:
                    return answer
                time.sleep(min(wait.left, pause * random.uniform(0.5, 1.5)))
                pause = min(LONGEST_PAUSE, pause * 1.5)
        except BackendUnavailable as exc:
            # The service may carry the claim out later on.
            self._keeper.doubt(grant_of(claim))
            raise_if_tables_missing(exc, backend.config.fence_database)
            raise
        finally:
            # Nothing may refer to the holder: a call of asyncio.to_thread() has ended then.
            wait.refused = tell

    def prepare(
        self, claims: list[Claim], wait: Wait, of_another_process: bool
    ) -> tuple[list[Claim], bool]:
        """Return claims as they are sent, and whether the service records their grants."""
        backend = self.backend
        for each in claims if not backend.supports_shared else ():
            if each.shared or is_path(each.name):
                raise _no_readers(each, backend)
        home = connections[backend.config.fence_database]
        if not (home.in_atomic_block and is_of_test(home)):
            return claims, backend.records_grants
        for claim in claims:
            self._limit_in_test(claim, wait, home, of_another_process)
        if not backend.records_grants or backend.records_unfenced:
            return claims, backend.records_grants
        # A session sees nothing of a test's own transaction: the grants are recorded here.
        return [claim._replace(fenced=False) for claim in claims], False

    def acquire_any(self, claims: Sequence[Claim], wait: Wait) -> tuple[Grant, float] | Held:
        """As `acquire()`, for any one of several locks, on a backend that `supports_any`."""
        try:
            while True:
                answer = self.backend.acquire_any(claims, wait)
                if isinstance(answer, Held):
                    return answer
                if found := self.confirm(*answer):
                    return found
                if not wait.left:
                    return Held()
        except BackendUnavailable as exc:
            self._keeper.doubt(*map(grant_of, claims))
            raise_if_tables_missing(exc, self.backend.config.fence_database)
            raise

    def _note_refusal(
        self,
        claim: Claim,
        wait: Wait,
        who: LocalHolder | None,
        tell: Callable[[Held], object],
        held: Held,
    ) -> bool:
        """Evict the holder if its process is gone, and return whether that was done."""
        if self.evict(claim, held):
            return True
        is_first, wait.held = wait.held is None, held
        if is_first:
            self.refuse_to_wait_for_caller(claim, wait, who)
            tell(held)
        return False

    def evict(self, claim: Claim, held: Held) -> bool:
        """Release the lock of a holder whose process is gone; return whether that was done."""
        if held.alias:
            self._drop_row(claim.name, held.owner, held.label, holder_of(held, held.alias))
            return True
        return self._evict_if_gone(claim.name, held, claim.fenced)

    def confirm(
        self, claim: Claim, granted: Granted, is_recorded: bool = False
    ) -> tuple[Grant, float] | None:
        """Record a grant that the service gave, or release it and return None."""
        grant, since = grant_of(claim, granted), granted.since
        confirmed: Grant | None = grant
        try:
            # It waited in the service's queue, or this process was paused.
            if self._clock() >= since + grant.ttl / BEATS:
                since = self._clock()
                (answer,) = self.backend.renew([grant])
                confirmed = grant if answer is Renewal.KEPT else None
            if confirmed and grant.fenced and not is_recorded:
                confirmed = self._record(grant, since)
            if confirmed:
                self._require_visible(confirmed)
        except BaseException:
            self.release(grant)
            raise
        # Once more before the caller's code runs: this process may have been paused.
        if confirmed and self._clock() < since + grant.ttl:
            # An earlier try of this owner must not be released now.
            self._keeper.trust(claim.owner, claim.name)
            return confirmed, since
        try:
            # Its failure ends the acquire: the doubt would release what a later try got.
            self.backend.release(grant)
        finally:
            self._keeper.clear_row(grant)
        return None

    def _record(self, grant: Grant, since: float) -> Grant | None:
        """
        Record a grant under its token, or under the number that follows the fence's.

        The service is asked for the holder *after* the fence was read, and the grant is recorded
        only if the fence is still the one that was read. In any other order a former holder could
        be recorded last. Returns None if another owner has the lock, or if a transaction has the
        fence locked.

        A reader has the token of the readers before it, if no writer was recorded since: the fence
        rises for the first one alone.
        """
        token, seen = None if grant.shared else grant.token, None
        try:
            for _ in range(ATTEMPTS):
                if token is not None and self.fences.record(grant, token, seen):
                    if seen is not None:
                        self._suggest(grant, token, seen)
                    return grant if token == grant.token else grant._replace(token=token)
                row, newest = self.fences.read(grant.name)
                config = self.backend.config
                if row is not None and row.conflicts_with(config.alias, self.backend.label):
                    self._drop_row(grant.name, row.owner.id, row.backend, row.holder())
                    continue
                if newest == (token, grant.owner):
                    # Recorded by a statement whose answer was lost.
                    return grant._replace(token=token)
                if not self.backend.verify(grant) or self._clock() >= since + grant.ttl:
                    return None
                seen, token = newest, newest[0] + (not grant.shared or newest[1] != SHARED)
        except Error as exc:
            self._raise_unless_pinned(grant, exc)
        return None

    def _suggest(self, grant: Grant, token: int, seen: Newest) -> None:
        """Tell a service with a counter which tokens were used: the fence `seen` was above it."""
        if token == seen[0] or (grant.token is None and not grant.shared):
            return
        alias, name = self.backend.config.alias, grant.name
        # Readers and forced releases raise a fence by themselves.
        if not grant.shared and seen[1] not in ("", SHARED):
            # Else each grant would be a warning, for millions of grants after a change of services.
            level = logging.DEBUG if self._stays_behind else logging.WARNING
            self._stays_behind = type(self.backend).suggest is Backend.suggest
            logger.log(
                level,
                "The service of alias %r was behind the tokens of lock %r, which go on from %d",
                alias,
                name,
                token,
                extra=logs.facts(name=name, alias=alias, token=token),
            )
        # A hint only.
        with contextlib.suppress(BackendUnavailable):
            self.backend.suggest(name, token)

    def _raise_unless_pinned(self, grant: Grant, error: Error) -> None:
        """Return if `error` says that a transaction has the fence locked: the claim is repeated."""
        home = connections[self.backend.config.fence_database]
        is_locked = self.fences.is_row_locked(error)
        if is_locked and home.vendor == "sqlite" and is_open(home):
            # It isn't the fence that is locked, but the file.
            raise self.backend.inside_transaction(grant.name) from error
        if not is_locked or home.vendor == "sqlite":
            raise self.backend.unavailable("record the grant of", error, grant.name) from error

    def release(self, grant: Grant) -> None:
        """Release a grant that the caller doesn't get, as far as possible."""
        try:
            self.backend.release(grant)
        except BackendUnavailable as exc:
            self._keeper.doubt(grant)
            known = logs.facts(name=grant.name, alias=self.backend.config.alias, owner=grant.owner)
            logs.left_to_run_out(logger, grant.name, exc, known)
        finally:
            self._keeper.clear_row(grant)

    def drop(self, *grants: Grant) -> None:
        """Release what an interrupted caller may have got, or may yet get: one of them."""
        self._keeper.doubt(*grants)
        with contextlib.suppress(RuntimeError):
            if len(grants) == 1:
                self.release(*grants)
                return
            with contextlib.suppress(BackendUnavailable):
                self.backend.release_all(grants)
            for grant in grants:
                self._keeper.clear_row(grant)

    def _evict_if_gone(self, name: str, held: Held, fenced: bool) -> bool:
        """Release the lock of a holder whose process is gone; return whether that was done."""
        process = Owner.read(held.owner, held.identity).process
        if not held.owner or not is_process_gone(process):
            return False
        grant = Grant(
            name,
            held.owner,
            token=held.token,
            fenced=fenced,
            shared=held.shared,
            identity=held.identity,
        )
        with contextlib.suppress(BackendUnavailable):
            if self.backend.release(grant):
                self._keeper.clear_row(grant)
                emit(Kind.EVICTED, self.backend, name, owner=held.owner, pid=process.pid)
                return True
        return False

    def refuse_to_wait_for_caller(self, claim: Claim, wait: Wait, who: LocalHolder | None) -> None:
        """Raise if the holder of the lock waits for this very call: its context has the lease."""
        # A child task that the holder started has it as well, and can't be distinguished here.
        lease = current_lease(claim.name)
        if lease is None or lease.alias != self.backend.config.alias or lease.lost or not wait.left:
            return
        holder = lease.who
        if holder is None or holder is who or holder.has_ended():
            return
        waits_for_call = holder.is_task() or is_in_call()
        if waits_for_call and not wait.required:
            wait.cancel()
        elif waits_for_call:
            raise LockNotAcquired(
                f"Lock {lease.name!r} is held by the code that called this function by "
                "sync_to_async, so waiting for it might never end. Use the caller's lease, "
                f"current_lease({lease.name!r}), or release it before the call.",
                name=lease.name,
                alias=self.backend.config.alias,
            )

    def _require_visible(self, grant: Grant) -> None:
        """Refuse a grant that the caller's transaction can't see: its snapshot is older."""
        home = connections[self.backend.config.fence_database]
        if not is_open(home) or not grant.fenced or not self.backend.excludes:
            return
        if LEDGERS[home.vendor].newest(home, grant.name) == (grant.token, grant.fence_owner):
            return
        raise InsideTransaction(
            f"Lock {grant.name!r} was granted with token {grant.token}, but this transaction "
            "has an older snapshot and can't see the grant. Acquire the lock first, and open "
            "the transaction inside of it (or use READ COMMITTED, where the database has it).",
            name=grant.name,
            alias=self.backend.config.alias,
        )

    def _limit_in_test(
        self, claim: Claim, wait: Wait, home: BaseDatabaseWrapper, of_another_process: bool
    ) -> None:
        """Within a ``TestCase``, don't wait, and refuse what would be refused outside of one."""
        # Only this very thread could release the lock.
        wait.seconds = 0.0
        # Outside of a test, another connection would wait for the code's own ``atomic()``.
        if of_another_process or home.vendor != "sqlite" or not has_own_block(home):
            return
        if self.backend.excludes and (claim.fenced or self.backend.records_unfenced):
            raise self.backend.inside_transaction(claim.name)

    def refusal(
        self,
        name: str,
        waited: float,
        fenced: bool = True,
        held: Held | None = None,
        shared: bool = False,
    ) -> LockNotAcquired:
        """Return the error that says who has the lock; `held` is what `acquire()` saw."""
        try:
            alias = self.backend.config.alias
            holder = holder_of(held, alias) if held and held.owner else self.holder(name)
        except BackendUnavailable:
            holder = None
        reader = "a holder beneath it, " if is_path(name) else "the reader "
        by = f"held by {reader if holder and holder.shared else ''}"
        by += str(holder or "an unknown holder")
        if holder and holder.shared and shared:
            by += ", and an exclusive holder waits for it"
        if fenced and (holder is None or holder.token is None):
            # That holder's grant isn't recorded yet: it may wait for the same transaction.
            using = self.backend.config.fence_database
            if blocker := pinned_by(using, name, BRIEFLY):
                by = f"free, but the next grant on {using!r} has to wait for {blocker}"
        return LockNotAcquired(
            f"Lock {name!r} is {by}. Waited {waited:.1f} s for it.",
            name=name,
            alias=self.backend.config.alias,
            holder=holder,
        )

    def holder(self, name: str) -> Holder | None:
        """Ask the service who has lock `name` now; one of its readers, if there are several."""
        return next(iter(self.holders(name)), None)

    def holders(self, name: str) -> list[Holder]:
        """Ask the service who has lock `name` now: its holder, or all its readers."""
        held = self.look_up([name]).get(name)
        found = () if held is None else (held, *held.others)
        return [holder_of(each, self.backend.config.alias) for each in found]

    def look_up(self, names: Sequence[str]) -> Mapping[str, Held]:
        """Ask the service who has these locks now."""
        try:
            return self.backend.holders(names)
        except BackendUnavailable as exc:
            raise_if_tables_missing(exc, self.backend.config.fence_database)
            raise

    def _drop_row(self, name: str, owner: str, label: str, holder: Holder) -> None:
        """Delete another alias's row of a name that its service says is free, or raise."""
        # The row of a lock outlives its release by a second. If the name is acquired there at this
        # moment, both grants are recorded, and the fence accepts the writes of the later one.
        using, alias = self.backend.config.fence_database, self.backend.config.alias
        with contextlib.suppress(Error):
            if self._is_free(holder.alias, label, using, name):
                self.fences.clear([Grant(name, owner)])
                return
        remedy = "Always lock a name through the same alias."
        if holder.alias == alias:
            remedy = "It was acquired before the alias was changed: try again once it is released."
        raise AliasConflict(
            f"Lock {name!r} is held through alias {holder.alias!r} ({label}), so it can't be "
            f"acquired through alias {alias!r} ({self.backend.label}). {remedy}",
            name=name,
            alias=alias,
            holder=holder,
        )


def new_claim(
    name: str,
    ttl: float,
    fenced: bool = True,
    *,
    owner: Owner | None = None,
    shared: bool = False,
) -> Claim:
    """Return a claim of the code that runs here, or of an owner that was made before."""
    owner = owner or new_owner()
    return Claim(name, owner.id, ttl, owner.identity, fenced, shared)


def _no_readers(claim: Claim, backend: Backend) -> SettingsError:
    what, argument = f"Lock {claim.name!r} can't be shared", "shared=True"
    if is_path(claim.name):
        what, argument = f"Path {read_path(claim.name)!r} can't be locked", "path=True"
    return SettingsError(
        f"{what}: alias {backend.config.alias!r} ({backend.label}) has exclusive locks alone. "
        f"Remove {argument}, or name an alias with one of these backends: "
        f"{', '.join(conf.sharing_backends())}."
    )


def holder_of(held: Held, alias: str) -> Holder:
    """Describe a holder, as errors and people see it."""
    now = datetime.now(UTC)
    age, left = held.held_for, held.expires_in
    return Holder(
        owner_id=held.owner,
        description=describe_identity(held.identity),
        alias=held.alias or alias,
        token=held.token,
        acquired_at=None if age is None else now - timedelta(seconds=age),
        expires_at=None if left is None else now + timedelta(seconds=left),
        session_pid=held.session_pid,
        shared=held.shared,
    )
