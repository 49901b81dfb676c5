"""What a holder has: the lease, its clock, and the leases of the running context."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import os
import sys
from asyncio import _get_running_loop as running_loop
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from django.core.exceptions import SynchronousOnlyOperation

from . import lease_context, logs
from .core import runtime
from .core.identity import Holder, LocalHolder, OfHolder, current_holder, describe_identity
from .core.names import a_value_of
from .core.runtime import clock
from .exceptions import BackendUnavailable, LeaseLost, NotTheHolder, Unfenced

if TYPE_CHECKING:
    from typing import Self

logger = logging.getLogger(__name__)

T = TypeVar("T")
Duration = float | int | timedelta
#: What the end of a block is given.
ErrorType = type[BaseException] | None
Error = BaseException | None
#: Those that are renewed and released together.
Leases = Sequence["Lease"]


class Control(Protocol):
    """What a lease asks of the part that took it."""

    def verify(self, lease: Lease) -> bool: ...
    def renew(self, leases: Leases, ttl: Duration | None) -> None: ...
    def release(self, leases: Leases, who: LocalHolder | None = None) -> bool: ...
    async def arelease(self, leases: Leases, who: LocalHolder | None = None) -> bool: ...
    def give_back(self, leases: Leases, who: LocalHolder | None) -> None: ...
    def atomic(self, leases: Leases, using: str | None) -> AbstractContextManager[None]: ...
    def lose_with(self, leases: Leases, why: str) -> None: ...
    def explain(self, leases: Sequence[Lease]) -> None: ...
    def abandon(self, lease: Lease) -> None: ...
    async def in_thread(self, function: Callable[..., T], *args: Any) -> T: ...


class Holding(OfHolder):
    """One lease, or several that are renewed and released together."""

    #: How error messages write it.
    _word: str
    _control: Control

    def __init__(self, control: Control, who: LocalHolder | None) -> None:
        super().__init__(who)
        self._control = control

    def _all(self) -> Leases:
        raise NotImplementedError

    def _own(self) -> Leases:
        """The leases without those that they release by themselves."""
        return self._all()

    def _suspects(self) -> Leases:
        """The leases, first the one whose loss is the reason of the others'."""
        return self._all()

    def _open(self) -> Leases:
        return [lease for lease in self._own() if lease.is_open()]

    def renew(self, ttl: Duration | None = None) -> None:
        """
        Make it last `ttl` from now; without one, the ttl that it has. Raises `LeaseLost`.

        A lease that was held for longer than its ``max_hold`` is lost then.
        """
        forbid_in_event_loop(f"{self._word}.renew()", f"await {self._word}.arenew()")
        self._require_open()
        self._control.renew(self._all(), ttl)

    def release(self) -> bool:
        """
        Release the lock; return False if the lock service no longer had this holder.

        A lease that was entered several times is released by the last of as many releases, and
        inside a transaction by its end.
        """
        forbid_in_event_loop(f"{self._word}.release()", f"await {self._word}.arelease()")
        if not (leases := self._open()):
            return False
        try:
            return _count_release(leases, self._control.release(leases))
        finally:
            self.leave()

    async def arenew(self, ttl: Duration | None = None) -> None:
        """See renew()."""
        await self._control.in_thread(self.renew, ttl)

    async def arelease(self) -> bool:
        """See release()."""
        if not (leases := self._open()):
            return False
        try:
            return _count_release(leases, await self._control.arelease(leases))
        finally:
            self.leave()

    def __enter__(self) -> Self:
        """Release the lock at the end of the block. This doesn't enter the lease once more."""
        who = self._begin_block(self.wait_until_left)
        try:
            forbid_in_event_loop(f"with {self._word}", f"async with {self._word}")
        except SynchronousOnlyOperation:
            self._release_in_thread()
            raise
        try:
            self._require_open()
        except LeaseLost:
            self.end_block(None, None, who)
            raise
        return self

    def __exit__(self, kind: ErrorType, error: Error, trace: object) -> None:
        self.end_block(kind, error, current_holder())

    async def __aenter__(self) -> Self:
        """See __enter__()."""
        if self._open() and self.who is not current_holder():
            for pause in self.pauses_until_left():
                await asyncio.sleep(pause)
        who = self._begin_block(self.is_left)
        try:
            self._require_open()
        except LeaseLost:
            await self.aend_block(None, None, who)
            raise
        return self

    async def __aexit__(self, kind: ErrorType, error: Error, trace: object) -> None:
        await self.aend_block(kind, error, current_holder())

    def _begin_block(self, is_left: Callable[[], bool]) -> LocalHolder:
        """Let the block release what one `acquire()` acquired; return the code's holder."""
        who = current_holder()
        leases = self._open()
        if leases and self.who is not who and not is_left():
            raise leases[0].not_the_holder()
        for lease in leases:
            if not lease.to_release:
                raise RuntimeError(
                    f"Lock {lease.name!r} is released by the block or the task that acquired it; "
                    f"`with {self._word}` would release it too early. Remove `with {self._word}`, "
                    f"or write `with lock({lease.name!r})`."
                )
        for lease in leases:
            lease.to_release -= 1
        return who

    def end_block(self, kind: ErrorType, error: Error, who: LocalHolder | None) -> None:
        """Release the lock at the end of a block, and raise its loss unless the block failed."""
        if kind is GeneratorExit and self.who is not who:
            self._release_in_thread()
            return
        try:
            if leases := self._open():
                self._control.give_back(leases, who)
        finally:
            self.leave()
        if error is None:
            self._raise_loss()

    async def aend_block(self, kind: ErrorType, error: Error, who: LocalHolder | None) -> None:
        """See end_block()."""
        if kind is GeneratorExit:
            # The coroutine is being closed, and can't await any more.
            self._release_in_thread()
            return
        leases = self._open()
        try:
            if leases:
                await self._control.arelease(leases, who)
        except BackendUnavailable as exc:
            for lease in leases:
                logs.left_to_run_out(logger, lease.name, exc, logs.about(lease))
        finally:
            self.leave()
        if error is None:
            self._raise_loss()

    def _release_in_thread(self) -> None:
        """Release in another thread: the garbage collector may run inside any code."""
        if leases := self._open():
            runtime.start(partial(self._control.give_back, leases, self.who))

    def enter(self) -> None:
        """Make the leases the innermost ones of the running context."""
        for lease in self._own():
            lease_context.enter(lease)

    def leave(self) -> None:
        """Take the leases out of the running context."""
        # The innermost first: it is found sooner.
        for lease in reversed(self._own()):
            lease_context.leave(lease)

    def _require_open(self) -> None:
        for lease in self._suspects():
            if lease.released or lease.lost:
                lease.check()

    def _raise_loss(self) -> None:
        for lease in self._suspects():
            if lease.why_lost:
                raise lease.loss()

    def atomic(self, using: str | None = None) -> AbstractContextManager[None]:
        """
        Open a transaction, the outermost one, in which everything is fenced by this lease.

        The next grant waits for its end. It has to be on the database where the fences are.
        """
        return self._control.atomic(self._all(), using)


def _count_release(leases: Leases, answer: bool) -> bool:
    for lease in leases:
        lease.to_release = max(0, lease.to_release - 1)
    return answer


class Lease(Holding):
    """
    A lock that was granted, for as long as it is renewed. ``with lease:`` releases it at the end.

    It doesn't promise that no other holder runs: its holder may be paused past its end. It promises
    that its ``token`` is newer than all before, so that a system that checks tokens rejects the
    writes of former holders.
    """

    _word = "lease"
    name: str
    owner_id: str
    fenced: bool
    #: Whether other readers may have the lock as well.
    shared: bool

    def __init__(
        self,
        grant: Any,
        control: Control,
        *,
        since: float,
        alias: str = "default",
        database: str = "default",
        who: LocalHolder | None = None,
        pattern: str = "",
        max_hold: float | None = None,
        lent: Callable[[], bool] | None = None,
        clock: Callable[[], float] = clock,
    ) -> None:
        super().__init__(control, who)
        self.grant = grant
        self.name = grant.name
        self.owner_id = grant.owner
        self.fenced, self.shared = grant.fenced, grant.shared
        self.alias = alias
        #: The alias of the database where the fence is.
        self.database = database
        #: The template of the name, if it has one; metrics are counted by it.
        self.pattern = pattern
        #: When it was asked for, and when its ttl is over, on the local clock.
        self.granted_at = since
        self.deadline: float = since + grant.ttl
        #: Until when it may be renewed, on the local clock; the last ttl goes on beyond.
        self.renewed_until = since + (math.inf if max_hold is None else max_hold)
        #: Of a path: the leases of the locks above its own, which it releases. The lowest first.
        self.above: Leases = ()
        #: How many times it was entered and not yet left; also by each path that is beneath it.
        self.entries = 1
        #: How many acquire()s returned it that neither a block nor a release has ended.
        self.to_release = 0
        #: The claim that entered it again last.
        self.entered_by: object = None
        #: Its release waits for the end of the caller's transaction.
        self.put_off = False
        #: Of a lease that a test's own transaction has recorded: returns whether that has ended.
        self.lent = lent
        #: Its release is under way, maybe in another thread: a coroutine was cancelled meanwhile.
        self.is_ending = False
        self.released = False
        self.why_lost = ""
        #: The reason is the one that is most likely; the database may have a better one.
        self.loss_is_guessed = False
        self._clock = clock
        self._pid = os.getpid()
        self._callbacks: list[Callable[[Lease], object]] = []
        self._interrupts: list[Callable[[Lease], object]] = []

    def _all(self) -> Leases:
        return (self, *self.above)

    def _suspects(self) -> Leases:
        return (*self.above, self)

    def _own(self) -> Leases:
        return (self,)

    @property
    def holder(self) -> Holder:
        """The holder, by the local clock. The lock service isn't asked: see `Lock.holder()`."""
        now, place = datetime.now(UTC), describe_identity(self.grant.identity)
        since, until = now - timedelta(0, self.held_for()), now + timedelta(0, self.remaining())
        token = self.grant.token
        return Holder(self.owner_id, place, self.alias, token, since, until, shared=self.shared)

    @property
    def ttl(self) -> float:
        """How long it lasts after a grant or a renewal, in seconds."""
        return float(self.grant.ttl)

    @ttl.setter
    def ttl(self, seconds: float) -> None:
        self.grant = self.grant._replace(ttl=seconds)

    @property
    def token(self) -> int:
        """The fencing token of this grant. It never changes."""
        if self.grant.token is None:
            raise Unfenced(
                f"Lock {self.name!r} was acquired with fenced=False, so this lease has no token. "
                "Acquire it without fenced=False to get one.",
                name=self.name,
            )
        return cast(int, self.grant.token)

    @property
    def lost(self) -> bool:
        """Whether the lock service refused this lease, or could not be asked for too long."""
        return bool(self.why_lost) or not self.is_of_this_process()

    @property
    def expired(self) -> bool:
        """Whether the ttl is over on the local clock. A renewal may still succeed."""
        return self.remaining() <= 0

    @property
    def held_too_long(self) -> bool:
        """Whether its `max_hold` is over."""
        return self._clock() > self.renewed_until

    def remaining(self) -> float:
        """Seconds that are left, counted from before the grant was asked for."""
        if self.lost or self.released:
            return 0.0
        left = max(0.0, self.deadline - self._clock())
        return min([left, *(each.remaining() for each in self.above)])

    def held_for(self) -> float:
        """Seconds since it was asked for and granted."""
        return self._clock() - self.granted_at

    def is_of_this_process(self) -> bool:
        """A child after fork owns nothing of its parent's."""
        return self._pid == os.getpid()

    def is_open(self) -> bool:
        """Whether this process has it, and hasn't released it."""
        if self.released or not self.is_of_this_process():
            return False
        return self.lent is None or not self.lent()

    def check(self) -> None:
        """
        Raise `LeaseLost` if this process knows the lease to be over, or its ttl has passed.

        `verify()` asks the lock service.
        """
        if self.released:
            raise self.loss("it was released")
        if not self.is_of_this_process():
            raise self.loss(f"it belongs to the parent process {self._pid}; acquire it again")
        for each in self.above:
            each.check()
        if self.why_lost:
            raise self.loss()
        if self.expired:
            ago = self._clock() - self.deadline
            raise self.loss(
                f"its ttl of {self.ttl:g} s ended {ago:.1f} s ago with no renewal; "
                "verify() asks whether another holder has the lock now"
            )

    def verify(self) -> bool:
        """Ask the lock service whether this is still the holder; a refusal marks the lease lost."""
        forbid_in_event_loop("lease.verify()", "await lease.averify()")
        return self.is_open() and all(map(self._control.verify, self._all()))

    async def averify(self) -> bool:
        """See verify()."""
        return await self._control.in_thread(self.verify)

    def not_the_holder(self) -> NotTheHolder:
        """Return the error for other code that would release it while its holder runs."""
        return NotTheHolder(
            f"Lock {self.name!r} was acquired by another thread, greenlet or task. Only that one "
            "may release it until it has ended.",
            name=self.name,
        )

    def on_lost(self, callback: Callable[[Lease], object]) -> None:
        """Call `callback(lease)` once it is lost, from another thread; at once if it is already."""
        self._callbacks.append(callback)
        if self.lost:
            self.run_callbacks()

    def interrupt_by(self, interrupt: Callable[[Lease], object]) -> None:
        """Call `interrupt(lease)` at its loss, from the thread that renews; it must not wait."""
        self._interrupts.append(interrupt)
        if self.lost:
            self._run(self._interrupts)

    def off_lost(self, callback: Callable[[Lease], object]) -> None:
        """Take back what is to be called at the loss, if it wasn't called yet."""
        for callbacks in (self._callbacks, self._interrupts):
            with contextlib.suppress(ValueError):
                callbacks.remove(callback)

    def mark_lost(self, why: str, *, guessed: bool = False) -> bool:
        """Note the loss and interrupt the body; return whether this call was the first to do so."""
        if self.why_lost or self.released:
            return False
        self.loss_is_guessed = guessed
        self.why_lost = why
        self._run(self._interrupts)
        return True

    def run_callbacks(self) -> None:
        """Call what `on_lost()` was given."""
        self._run(self._callbacks)

    def explain(self) -> None:
        """Find out the reason of the loss if it is guessed so far. Asks the database."""
        if self.loss_is_guessed:
            self._control.explain([self])

    def loss(self, why: str = "") -> LeaseLost:
        """Return the error of this lease's loss."""
        why = why or self.why_lost or "the lock service no longer knows this holder"
        return LeaseLost(
            f"The lease of lock {self.name!r} ({self._described()}) is gone: {why}.",
            name=self.name,
            owner_id=self.owner_id,
            token=self.grant.token,
        )

    def _run(self, callbacks: list[Callable[[Lease], object]]) -> None:
        while callbacks:
            try:
                callback = callbacks.pop(0)
            except IndexError:
                return  # Its owner has taken the last one back meanwhile.
            try:
                callback(self)
            except Exception:
                logger.exception(
                    "A callback for the loss of lock %r failed", self.name, extra=logs.about(self)
                )

    def _described(self) -> str:
        token = f"token {self.grant.token}" if self.fenced else "unfenced"
        return f"{token}, shared" if self.shared else token

    def __del__(self) -> None:
        # The holder has ended: as long as it lives, it refers to its leases.
        if self._who is None or self.lent or self.why_lost or sys.is_finalizing():
            return
        if self.is_open():
            self._control.abandon(self)

    def __repr__(self) -> str:
        state = "released" if self.released else "lost" if self.lost else "held"
        return f"<Lease {self.name!r} {self._described()} {state}, {self.remaining():.1f} s left>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"The lease of lock {self.name!r} can't be pickled: it belongs to this process. "
            "Pass lease.token on instead."
        )


def forbid_in_event_loop(call: str, instead: str) -> None:
    """Raise an error in a coroutine, with what to write instead of `call`."""
    if running_loop() is not None and not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
        raise SynchronousOnlyOperation(
            f"{call} would block the event loop; write `{instead.format(call)}`."
        )


def require_finished(result: T, function: Callable[..., Any], decorator: str, remedy: str) -> T:
    """Return the result of a decorated function; raise if its work is still to be done."""
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(
            f"{decorator} can't wrap {getattr(function, '__name__', function)}(): it returned "
            f"{a_value_of(type(result))}, which would run after the lock was released. {remedy}"
        )
    return result


def current_lease(name: str | None = None) -> Lease | None:
    """
    Find the innermost lease of the running context, or the innermost of lock `name`.

    A context that was copied (a child task, ``sync_to_async``) sees its parent's leases.
    A lost lease is found too: a write under it has to be rejected.
    """
    return cast("Lease | None", lease_context.find(name))
