"""Several locks at once, all of them or none: `lock_all()`."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, cast, overload

from django.db import transaction

from . import conf
from .acquiring import Acquiring, suspended_block
from .backends.interface import Claim, Held, Wait
from .conf import UNSET, Unset
from .core import aio, names
from .core.grants import new_claim
from .core.identity import LocalHolder, OfHolder, current_holder, new_owner_id
from .core.manager import Service
from .core.runtime import clock
from .core.set_grants import refusal
from .exceptions import FencedLockError, LeaseLost, LockNotAcquired
from .lease import Duration, Holding, Lease, Leases, forbid_in_event_loop

if TYPE_CHECKING:
    # At run time, a type variable has a default from Python 3.13 on.
    from typing_extensions import TypeVar

    #: What a block is given: the leases, or with ``required=False`` maybe None.
    S = TypeVar("S", bound="LeaseSet | None", default="LeaseSet", covariant=True)
else:
    from typing import TypeVar

    S = TypeVar("S")

#: Limit of the names of a set.
MAX_NAMES = 1000

#: The sets of the running context, the innermost last. Weak, as `lease_context` says.
_sets: ContextVar[tuple[weakref.ref[LeaseSet], ...]] = ContextVar("fencedlock_sets", default=())


class LeaseSet(Holding, Mapping[str, Lease]):
    """
    The leases of a set of locks, by name, in the order of the names.

    If one of them is lost, all are. ``leases.atomic()`` opens a transaction that is fenced by all.
    """

    _word = "leases"
    # Two sets of the same leases are not the same block.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, leases: Sequence[Lease], control: Service, who: LocalHolder) -> None:
        super().__init__(cast(Any, control), who)
        self._database = control.config.fence_database
        self._by_name = {lease.name: lease for lease in leases}
        self._together = _Together(leases)
        for lease in leases:
            lease.interrupt_by(self._together)

    def __getitem__(self, name: str) -> Lease:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"<LeaseSet {list(self._by_name.values())!r}>"

    @property
    def lost(self) -> bool:
        """Whether one of the leases is lost, and with it all."""
        return any(lease.lost for lease in self._all())

    def remaining(self) -> float:
        """Seconds that are left of the lease that ends first."""
        return min((lease.remaining() for lease in self._all()), default=0.0)

    def check(self) -> None:
        """Raise `LeaseLost` if this process knows one of the leases to be over."""
        for lease in self._suspects():
            lease.check()

    def verify(self) -> bool:
        """Ask the lock service whether this is still the holder of all the locks."""
        forbid_in_event_loop("leases.verify()", "await leases.averify()")
        leases = self._open()
        return len(leases) == len(self) and all(map(self._control.verify, leases))

    async def averify(self) -> bool:
        """See verify()."""
        return await self._control.in_thread(self.verify)

    def on_lost(self, callback: Callable[[LeaseSet], object]) -> None:
        """Call `callback(leases)` once they are lost, from another thread; at once if they are."""
        mutex = threading.Lock()

        def call_once(lease: Lease) -> None:
            # Each lease of the set calls it.
            if mutex.acquire(blocking=False):
                callback(self)

        for lease in self._all():
            lease.on_lost(call_once)

    def interrupt_by(self, interrupt: Callable[[Lease], object]) -> None:
        """See `Lease.interrupt_by()`. The loss of one is the loss of the first, too."""
        self._all()[0].interrupt_by(interrupt)

    def off_lost(self, callback: Callable[[Lease], object]) -> None:
        """Take back what `interrupt_by()` was given."""
        self._all()[0].off_lost(callback)

    def explain(self) -> None:
        """Find out the reason of the loss if it is guessed so far. Asks the database."""
        self._lost_first().explain()

    def loss(self) -> LeaseLost:
        """Return the error of the loss, with the lease that was lost first."""
        return self._lost_first().loss()

    def atomic(self, using: str | None = None) -> AbstractContextManager[None]:
        """
        Open a transaction, the outermost one, in which everything is fenced by all the leases.

        The next grant of each lock waits for its end. It has to be on the database where the
        fences are.
        """
        if not self._by_name:
            return transaction.atomic(using or self._database)
        return super().atomic(using)

    def _all(self) -> Leases:
        return tuple(self._by_name.values())

    def _suspects(self) -> Leases:
        cause = self._together.cause
        return sorted(self._all(), key=lambda lease: lease is not cause)

    def _lost_first(self) -> Lease:
        suspects = self._suspects()
        return next((lease for lease in suspects if lease.lost), suspects[0])

    def enter(self) -> None:
        super().enter()
        sets = (each for each in _sets.get() if each() is not None)
        _sets.set((*sets, weakref.ref(self)))

    def leave(self) -> None:
        super().leave()
        _sets.set(tuple(each for each in _sets.get() if each() not in (None, self)))
        for lease in self._open():
            # An outer block holds it longer than this set.
            lease.off_lost(self._together)


def current_leases() -> LeaseSet | None:
    """
    Find the innermost set of leases of the running context, such as that of a task's body.

    ``with current_leases().atomic():`` fences everything in it by all of them.
    """
    for each in reversed(_sets.get()):
        leases = each()
        if leases is not None and leases._open():
            return leases
    return None


class _Together:
    """Marks all leases of a set as lost once one of them is."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        # Weak: an abandoned lease is released when nothing else refers to it.
        self._leases = [weakref.ref(lease) for lease in leases]
        #: The lease that was lost first.
        self.cause: Lease | None = None

    def __call__(self, lost: Lease) -> None:
        if self.cause is not None:
            return
        self.cause = lost
        others = [lease for each in self._leases if (lease := each()) and lease is not lost]
        why = f"lock {lost.name!r}, which was acquired with it by lock_all(), was lost"
        lost._control.lose_with(others, why)


class LockSet(Acquiring, Generic[S]):
    """
    Several locks, for ``with``, ``async with``, ``acquire()`` or ``aacquire()``: all, or none.

    No two sets wait for each other: see `lock_all()`.
    """

    def __init__(self, names: Sequence[str], **options: Any) -> None:
        super().__init__(**options)
        self._names = names

    def acquire(
        self,
        blocking: bool = True,
        *,
        blocking_timeout: Duration | Unset | None = UNSET,
        cancel: threading.Event | None = None,
    ) -> LeaseSet | None:
        """
        Acquire all locks, or enter again those that this thread or task holds.

        Returns None if another holder had one of them until the time was over, or until `cancel`
        was set, which ends the wait within two seconds.
        """
        forbid_in_event_loop(self._title, "await {}.aacquire()")
        asked = self._ask(self._find_names(), blocking, blocking_timeout, cancel)
        try:
            leases = self._acquire(asked, asked.wait)
            if leases is not None:
                leases.enter()
                for lease in leases.values():
                    # In one go, and in this order, as far as signals are concerned.
                    lease.entered_by, lease.to_release = asked.wait, lease.to_release + 1
            return leases
        except FencedLockError:
            raise
        except BaseException:
            # Ctrl-C, or a signal's handler: the caller doesn't get the leases.
            asked.control.interrupted(asked.claims, asked.wait)
            raise

    async def aacquire(
        self, blocking: bool = True, *, blocking_timeout: Duration | Unset | None = UNSET
    ) -> LeaseSet | None:
        """See acquire(). Release them with ``await leases.arelease()``."""
        names = await self._afind_names()
        leases = await self._aacquire(self._ask(names, blocking, blocking_timeout))
        if leases is not None:
            for lease in leases.values():
                lease.to_release += 1
        return leases

    def __enter__(self) -> S:
        forbid_in_event_loop(self._title, "async with {}")
        block = suspended_block()
        asked = self._ask(self._find_names(), True, UNSET)
        try:
            leases = self._acquire(asked, asked.wait)
            if leases is not None:
                leases.enter()
            elif self.required:
                raise asked.refusal()
            self._entered.append((block, OfHolder(asked.who) if leases is None else leases))
            return cast(S, leases)
        except FencedLockError:
            raise
        except BaseException:
            # As in acquire(): a block that was never entered is never left.
            asked.control.interrupted(asked.claims, asked.wait)
            raise

    async def __aenter__(self) -> S:
        block = suspended_block()
        asked = self._ask(await self._afind_names(), True, UNSET)
        leases = await self._aacquire(asked)
        if leases is None and self.required:
            raise await asked.control.in_thread(asked.refusal, kind=aio.TRY)
        self._entered.append((block, OfHolder(asked.who) if leases is None else leases))
        return cast(S, leases)

    def __repr__(self) -> str:
        return f"{self._title[:-1]}{', ' * bool(self._names)}backend={self.backend!r})"

    @property
    def _title(self) -> str:
        return f"lock_all({', '.join(map(repr, self._names))})"

    def _find_names(self) -> Sequence[str]:
        return self._names

    async def _afind_names(self) -> Sequence[str]:
        return self._names

    def _ask(
        self,
        names: Sequence[str],
        blocking: bool,
        blocking_timeout: Duration | Unset | None,
        cancel: threading.Event | None = None,
    ) -> _Asked:
        control, who = self._service, current_holder()
        wait = self._wait(control, blocking, blocking_timeout, cancel)
        ttl = self._ttl or control.config.ttl
        any_of_them = new_claim("", ttl, self.fenced)
        claims = [any_of_them._replace(name=name, owner=new_owner_id()) for name in names]
        return _Asked(control, claims, who, wait)

    def _acquire(self, asked: _Asked, wait: Wait, tells: bool = True) -> LeaseSet | None:
        answer = asked.control.acquire_all(
            asked.claims, wait, asked.who, pattern=self.pattern, tells=tells
        )
        if isinstance(answer, dict):
            asked.refused = answer
            return None
        return LeaseSet(answer, asked.control, asked.who)

    async def _aacquire(self, asked: _Asked) -> LeaseSet | None:
        missing = asked.missing()
        if missing:
            # Its time may be over before its turn comes.
            asked.refused = {missing[0]: Held()}
            acquire = functools.partial(self._acquire, asked)
            tell = functools.partial(asked.tell_refused, self.pattern)
            # The turn of one name alone: a set that waits has the lock of its first name, or waits
            # for it. With all turns, it would stop waiters for names that are free.
            leases = await self._wait_async(missing[0], asked.wait, acquire, tell)
        else:
            leases = self._acquire(asked, asked.wait)
        if leases is not None:
            leases.enter()
        return leases


class _Asked:
    """What one acquire of a set asks for, and who refused it."""

    def __init__(
        self, control: Service, claims: Sequence[Claim], who: LocalHolder, wait: Wait
    ) -> None:
        self.control, self.claims, self.who, self.wait = control, claims, who, wait
        self.refused: dict[str, Held] = {}

    def missing(self) -> list[str]:
        """Return the names that the holder doesn't hold already."""
        return [each.name for each in self.claims if not self.control.lease_of(each.name, self.who)]

    def tell_refused(self, pattern: str, waited: float) -> None:
        for name, held in self.refused.items():
            self.control.tell_refused(name, pattern, waited, held)

    def refusal(self) -> LockNotAcquired:
        waited, fenced = clock() - self.wait.since, self.claims[0].fenced
        return refusal(self.control.grants, self.missing(), waited, fenced, self.refused)


@overload
def lock_all(
    *names: str | Iterable[str],
    ttl: Duration | None = ...,
    blocking_timeout: Duration | Unset | None = ...,
    backend: str = ...,
    fenced: bool = ...,
    required: Literal[True] = ...,
) -> LockSet[LeaseSet]: ...
@overload
def lock_all(
    *names: str | Iterable[str],
    ttl: Duration | None = ...,
    blocking_timeout: Duration | Unset | None = ...,
    backend: str = ...,
    fenced: bool = ...,
    required: bool,
) -> LockSet[LeaseSet | None]: ...
def lock_all(
    *names: Any,
    ttl: Duration | None = None,
    blocking_timeout: Duration | Unset | None = UNSET,
    backend: str = conf.DEFAULT_ALIAS,
    fenced: bool = True,
    required: bool = True,
    # A type checker rejects any other argument; at run time the error names it.
    **unknown: Never,
) -> LockSet[Any]:
    """
    Name several locks: ``with lock_all("account:1", "account:2") as leases, leases.atomic():``.

    All of them are acquired, or none. While a set waits for one lock, it holds only locks whose
    names are sorted below, so that sets never wait for each other. The options are those of
    `lock()`; `blocking_timeout` is for all of them together.

    Args:
        names: The names, or one iterable of names, in any order.
    """
    for each in unknown:
        hint = conf.unknown(each, ("ttl", "blocking_timeout", "backend", "fenced", "required"))
        raise TypeError(f"lock_all() has no argument {each}. {hint}")
    if len(names) == 1 and isinstance(names[0], Iterable) and not isinstance(names[0], str | bytes):
        names = tuple(names[0])
    if not names:
        raise ValueError("lock_all() was given no names, so it would lock nothing.")
    return LockSet(
        sort_names(names, "lock_all()"),
        ttl=ttl,
        blocking_timeout=blocking_timeout,
        backend=backend,
        fenced=fenced,
        required=required,
    )


def sort_names(given: Iterable[Any], what: str) -> list[str]:
    """Return names in the order of their bytes, each once."""
    # By code points, which is the order of their bytes in UTF-8 as well.
    found = sorted({names.validate(name) for name in given})
    if len(found) > MAX_NAMES:
        raise ValueError(
            f"{what} was given {len(found)} names; {MAX_NAMES} are allowed. Lock them in parts, or "
            "use one lock for what they have in common."
        )
    return found
