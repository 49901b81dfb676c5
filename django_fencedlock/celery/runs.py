"""One run of a task: the lock around its body."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from celery.app.task import Context

from .. import logs, signals
from ..backends.base import Request
from ..core import runtime
from ..core.identity import Holder, current_holder, new_owner, running_task
from ..core.manager import Service, service
from ..core.runtime import clock
from ..exceptions import BackendUnavailable, LockNotAcquired
from ..lease import Lease, enter, leave
from .messages import RUN
from .shield import Shield
from .tasks import Single

logger = logging.getLogger(__name__)

#: The runs of this context, the innermost last.
_running: ContextVar[tuple[Run, ...]] = ContextVar("fencedlock_runs", default=())
#: The run whose new arguments are on their way through what stands above its function.
_converting: ContextVar[Run | None] = ContextVar("fencedlock_converting", default=None)


class Run:
    """
    One run of a task, from the wish for its lock to the lock's return.

    Each delivery, each retry and each call is a run with an owner and a token of its own.
    """

    def __init__(self, single: Single, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        task, rest = single.task_of(args)
        self.single = single
        self.policy = single.policy
        self.task: Any = task
        #: Captured here: other threads have none.
        self.request: Any = None if task is None else _request_of(task)
        self.title = single.title(task)
        self.name = single.name(task, rest, kwargs)
        self.args = args
        self.kwargs = kwargs
        #: They are another message's, and nothing has converted them as it did with one's own.
        self.is_raw = False
        self.service: Service = service(self.policy.backend)
        self.who = current_holder()
        # Made before the request is sent: a time limit may strike between grant and return.
        self.owner = new_owner(self._task())
        self.lease: Lease | None = None
        self.shield = Shield()

    @property
    def is_called_directly(self) -> bool:
        """Whether no message and no ``apply()`` stands behind this run."""
        return self.request is None or bool(self.request.called_directly)

    def facts(self, reason: str | None = None) -> dict[str, Any]:
        """The ``extra`` of a log record about this run."""
        return logs.facts(
            name=self.name,
            alias=self.policy.backend,
            token=self.lease.token if self.lease and self.lease.fenced else None,
            owner=self.owner.id,
            task=self.title,
            reason=reason,
        )

    def raise_loss(self, lease: Lease) -> None:
        """Fail if the lock was lost: the task isn't to say that it ran alone."""
        if lease.lost and self.policy.on_lost != "ignore":
            lease.explain()
            raise lease.loss()

    @property
    def aborts(self) -> bool:
        """Whether the body is interrupted when its lock is lost."""
        # A greenlet can't be interrupted by a signal or an asynchronous exception.
        return self.policy.on_lost == "abort" and not runtime.is_patched("_thread")

    @property
    def is_nested(self) -> bool:
        """Whether a run of this lock, in this very thread or greenlet, waits for this one's end."""
        return any(
            outer.name == self.name and outer.service is self.service and outer.who is self.who
            for outer in _running.get()
        )

    def acquire(self, on_refusal: Callable[[Sequence[Holder]], object]) -> Lease:
        """Acquire the lock, or raise `LockNotAcquired`, or what `on_refusal` raises."""
        self._refuse_own_lock()
        started = clock()
        request = Request(
            self.name,
            self.owner,
            self.policy.ttl or self.service.config.ttl,
            self.policy.fenced,
            self._patience(),
            self.shield.cancel,
            on_refusal=on_refusal,
            # A worker's, but for a plain call.
            of_another_process=not self.is_called_directly,
        )
        pattern = self.single.pattern(self.task)
        lease = self.service.acquire(
            request, self.who, pattern=pattern, max_hold=self.policy.max_hold
        )
        if lease is None:
            waited = clock() - started
            raise self.service.refusal(self.name, waited, request.fenced, request.seen)
        self.lease = lease
        if self.request is not None:
            # What the task publishes from now on may have to wait until this lock is free.
            setattr(self.request, RUN, self.owner.id)
        return lease

    def _patience(self) -> float:
        if self.policy.on_conflict != "wait":
            return 0.0
        timeout = self.policy.blocking_timeout
        return self.service.config.blocking_timeout if timeout is None else timeout

    def _refuse_own_lock(self) -> None:
        """
        Refuse to run within a block that has the lock, but for a plain call.

        To wait for it would be to wait for oneself.
        """
        held = self.service.lease_of(self.name, self.who)
        if held is None or (self.is_called_directly and not self.is_nested):
            return
        if not self.service.backend.excludes:
            return
        raise LockNotAcquired(
            f"Lock {self.name!r} is held by the very code that called {self.title}, which can't "
            "go on before this call returns. Call it after the lock was given back.",
            name=self.name,
            alias=self.policy.backend,
            holder=self.service.holder(self.name),
        )

    def tell_bypassed(self, reason: str) -> None:
        """Send the signal for a run that goes on without its lock."""
        signals.send(
            signals.lock_bypassed,
            type(self.service.backend),
            name=self.name,
            alias=self.policy.backend,
            pattern=self.single.pattern(self.task),
            task=self.title,
            reason=reason,
        )

    def call(self) -> Any:
        """Run the body."""
        with self.shield.lifted():
            if self.is_raw:
                return self._convert_and_call()
            return self.single.function(*self.args, **self.kwargs)

    def _convert_and_call(self) -> Any:
        """Go through what stands between Celery and the function, as with ``pydantic=True``."""
        mark = _converting.set(self)
        try:
            # Not through autoretry_for, which this call is within.
            above = getattr(self.task, "_orig_run", self.task.run)
            has_task = bool(self.args) and self.args[0] is self.task
            return above(*self.args[has_task:], **self.kwargs)
        finally:
            _converting.reset(mark)

    def give_back(self, lease: Lease) -> None:
        try:
            self.service.release(lease, self.who)
        except BackendUnavailable as exc:
            # The work is done, and the lock runs out by itself.
            logs.left_to_run_out(logger, lease.name, exc, self.facts())

    def give_back_left_over(self) -> None:
        """Give back what a time limit, which may strike anywhere, kept from being given back."""
        lease = self.lease or self.service.lease_of(self.name, self.who)
        if lease is not None and lease.owner_id == self.owner.id and lease.is_open():
            self.give_back(lease)

    def _task(self) -> tuple[str, str]:
        """The task's name and its id."""
        task_id = None if self.request is None else self.request.id
        return self.title, task_id or ""

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Have every lock that is taken here tell the task in its words."""
        mark = running_task.set(self._task())
        try:
            yield
        finally:
            running_task.reset(mark)

    @contextmanager
    def entered(self, lease: Lease) -> Iterator[None]:
        """Make it the context's lease, which fenced models and `current_lease()` see."""
        with self.running():
            enter(lease)
            try:
                yield
            finally:
                leave(lease)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the run whose body this is."""
        mark = _running.set((*_running.get(), self))
        try:
            yield
        finally:
            _running.reset(mark)


def is_converted(single: Single) -> bool:
    """Whether a call of the task comes from a run of it, with arguments that it can use."""
    run = _converting.get()
    if run is None or run.single is not single:
        return False
    # Another call, within the body, is a run of its own.
    _converting.set(None)
    return True


def _request_of(task: Any) -> Any:
    """Celery's request of this call: one that says no more than the id if no message made it."""
    request = task.request
    # Within the body of a message, Celery gives a call of the same task the message's request, or
    # a copy: with its headers, its chain and its retries.
    if any(outer.task is task and outer.request.id == request.id for outer in _running.get()):
        return Context(id=request.id)
    return request
