"""One run of a task: acquire its lock, run the body, release the lock."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry

from .. import logs, signals
from ..backends.interface import Wait
from ..core import runtime, set_grants
from ..core.grants import new_claim
from ..core.identity import current_holder, running_task
from ..core.names import held_as
from ..exceptions import AliasConflict, BackendUnavailable, LockNotAcquired
from ..lease import Lease, require_finished
from ..lock_sets import LeaseSet
from . import duplicates, interrupts
from .coalesce import Arguments, Coalescing
from .duplicates import CONFLICTS, RUN, HolderGone
from .names import MARK, Call, Single, is_bound, single_of
from .policy import Skip, SkippedRun

logger = logging.getLogger(__name__)

_TO_ITS_END = "Celery doesn't run it: run it to its end in the task, as async_to_sync() does."

#: The runs of this context, the innermost last.
_running: ContextVar[tuple[Run, ...]] = ContextVar("fencedlock_runs", default=())
#: The run whose new arguments pass through the code above its function.
_converting: ContextVar[Run | None] = ContextVar("fencedlock_converting", default=None)


class Run(Call):
    """One run of a task. A step that finds nothing to run returns a `Skip`."""

    def __init__(self, single: Single, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        task, arguments = single.task_of(args)
        request = None if task is None else _request_of(task)
        super().__init__(single, task, arguments, kwargs, request)
        #: All that the function gets, which may begin with the task.
        self._all_args = args
        self._who = current_holder()
        self._time_limit = interrupts.DeferredTimeLimit()
        # A subclass's own run() may call this one for any part of its message.
        is_whole = single_of(task) is single
        self._delivery = duplicates.delivery_of(self) if is_whole else None
        self._coalescing: Coalescing | None = None
        if self.policy.on_conflict == "coalesce" and is_whole and self.service.backend.excludes:
            self._coalescing = Coalescing(self, self._delivery)
        #: Arguments from the message of another trigger, instead of the run's own.
        self._latest: Arguments | None = None
        #: Whether the run has its lock and isn't killed, so that it can look for more work.
        self._ends_normally = False

    def perform(self) -> Any:
        """
        Run the task, or do what ``on_conflict`` says; return its result.

        It calls `run_interruptible()` itself: each frame in between is in every traceback.
        """
        with self._time_limit:
            running, converting = _running.get(), _converting.get()
            mark = running_task.set((self.title, self.task_id))
            try:
                result = self._begin()
                if result is None:
                    try:
                        body = self._enter()
                        result = interrupts.run_interruptible(*body, self._time_limit.allowed())
                        require_finished(result, body[1], "@single_instance", _TO_ITS_END)
                        self._raise_loss()
                    except BaseException as error:
                        self._leave(outcome(error, self.task, self.request))
                        raise
                    self._leave("success")
            finally:
                try:
                    self._release()
                finally:
                    _running.set(running)
                    _converting.set(converting)
                    running_task.reset(mark)
            self._raise_loss()
            return result

    def _begin(self) -> SkippedRun | None:
        """Acquire the lock; return the result if there is nothing to run."""
        try:
            skip = self._coalescing.before() if self._coalescing is not None else None
            skip = skip or self._acquire()
        except AliasConflict:
            # Two lock services for one name: an error of the settings, not a conflict of runs.
            raise
        except LockNotAcquired as refusal:
            return self._answer(refusal)
        except BackendUnavailable as exc:
            if self.policy.on_backend_error != "run":
                raise
            self._report_bypass(str(exc))
            return None
        if skip is None and self._coalescing is not None:
            skip, self._latest = self._coalescing.begin()
        elif skip is None and self._delivery is not None:
            skip = self._delivery.begin()
        return None if skip is None else SkippedRun.made(self.name, skip)

    def _enter(
        self,
    ) -> tuple[Lease | LeaseSet | None, Callable[..., Any], Sequence[Any], dict[str, Any]]:
        """Begin the body; return the lease whose loss interrupts it, and what to call."""
        if self.lease is not None:
            self.lease.enter()
        _running.set((*_running.get(), self))
        # A greenlet can't be interrupted by a signal or an asynchronous exception.
        aborts = self.policy.on_lost == "abort" and not runtime.is_patched("_thread")
        lease = self.lease if aborts else None
        if self._latest is None:
            return lease, self.single.function, self._all_args, self.kwargs
        args, kwargs = self._latest
        # Not through autoretry_for, which called this run.
        above = getattr(self.task, "_orig_run", self.task.run)
        if getattr(above, "__func__", above) is self.single.wrapper:
            own = (self.task,) if is_bound(self.task) else ()
            return lease, self.single.function, (*own, *args), kwargs
        # Through the code between Celery and the function, such as that of ``pydantic=True``.
        _converting.set(self)
        return lease, above, args, kwargs

    def _leave(self, outcome: str) -> None:
        """End the body, and record how it ended before the lock is released."""
        if self.lease is not None:
            self.lease.leave()
        self._ends_normally = bool(outcome)
        # In this order: if the process dies in between, the message finds nothing to do.
        if self._coalescing is not None:
            self._coalescing.ended(outcome)
        if self._delivery is not None:
            self._delivery.ended(outcome)

    # The lock

    def _acquire(self) -> Skip | None:
        """Acquire the lock; return why there is nothing to run."""
        while refusal := self._refuse_own_lock() or self._try_to_acquire():
            try:
                skip: Skip | None = None
                found = (refusal.holders or {refusal.name: refusal.holder}).values()
                if self._delivery is not None and (holders := [each for each in found if each]):
                    skip = self._delivery.conflict(holders)
                if skip is None:
                    # A plain call gets the error, so no other run has to do its work.
                    if self._coalescing is None or not self.may_skip:
                        raise refusal
                    skip = self._coalescing.refused()
            except HolderGone:
                continue
            if skip is not None:
                return skip
        return None

    def _refuse_own_lock(self) -> LockNotAcquired | None:
        """Return the error of a call that would wait for the code that made it."""
        keys = self.names if self.is_set else [held_as(self.name, self.permits)]
        held = next(filter(None, (self.service.lease_of(key, self._who) for key in keys)), None)
        if held is None or not self.service.backend.excludes:
            return None
        if self.is_called_directly and not self._is_nested():
            return None
        return LockNotAcquired(
            f"Lock {held.name!r} is held by the code that called {self.title}, which can't "
            "continue before this call returns. Call it after the lock was released.",
            name=held.name,
            alias=self.policy.backend,
            holder=held.holder,
        )

    def _is_nested(self) -> bool:
        """Return whether a run that has one of the same locks called this one."""
        return any(
            not {*outer.names}.isdisjoint(self.names)
            and outer.service is self.service
            and outer._who is self._who
            for outer in _running.get()
        )

    def _try_to_acquire(self) -> LockNotAcquired | None:
        patience = 0.0
        if self.policy.on_conflict == "wait":
            patience = self.policy.patience(self.service.config)
        self._time_limit.wait = wait = Wait(
            patience, partial(duplicates.postpone_until_publisher_ends, self)
        )
        if self._time_limit.deferred is not None:
            wait.cancel()
        refused = (self._acquire_set if self.is_set else self._acquire_one)(wait)
        if refused is None:
            self._ends_normally = True
            if self.request is not None:
                # A message that the task publishes from now on may have to wait for this lock.
                setattr(self.request, RUN, " ".join(each.owner_id for each in self.leases))
        return refused

    def _acquire_one(self, wait: Wait) -> LockNotAcquired | None:
        claim = self.claim()
        lease = self.service.acquire(claim, wait, self._who, **self._options())
        if lease is None:
            return self.service.refusal(claim, wait)
        self.lease, self.leases = lease, [lease]
        return None

    def _acquire_set(self, wait: Wait) -> LockNotAcquired | None:
        fenced = self.policy.fenced
        # Owners of its own for each try: what is still done for a former one must not hit the next.
        claims = [new_claim(name, self.ttl, fenced) for name in self.names]
        answer = self.service.acquire_all(claims, wait, self._who, **self._options())
        if isinstance(answer, dict):
            missing = [n for n in self.names if not self.service.lease_of(n, self._who)]
            waited = wait.now() - wait.since
            return set_grants.refusal(self.service.grants, missing, waited, fenced, answer)
        self.lease, self.leases = LeaseSet(answer, self.service, self._who), answer
        # The record of a message is under the first name.
        self.owner = self.owner._replace(id=answer[0].owner_id)
        return None

    def _options(self) -> dict[str, Any]:
        return {
            "pattern": self.pattern,
            "max_hold": self.policy.max_hold,
            # A plain call may run in any process; a message is for a worker.
            "of_another_process": not self.is_called_directly,
        }

    def _release(self) -> None:
        """Release the lock, then look for triggers that were counted meanwhile."""
        try:
            if self.leases:
                self.service.release(self.leases, self._who)
        except BackendUnavailable as exc:
            # The work is done, and the lock expires.
            logs.left_to_run_out(logger, self.name, exc, self.facts())
        if self._coalescing is not None and self._ends_normally:
            self._coalescing.released()

    def _raise_loss(self) -> None:
        """Fail if the lock was lost: the result would say that the task ran alone."""
        if self.lease is not None and self.lease.lost and self.policy.on_lost != "ignore":
            self.lease.explain()
            raise self.lease.loss()

    def _report_bypass(self, reason: str) -> None:
        text, extra = "%s runs without its lock %r: %s", self.facts(reason)
        logger.error(text, self.title, self.name, reason, extra=extra)
        facts = {"name": self.name, "alias": self.policy.backend, "pattern": self.pattern}
        sender = type(self.service.backend)
        signals.send(signals.lock_bypassed, sender, **facts, task=self.title, reason=reason)

    # Conflicts

    def _answer(self, refusal: LockNotAcquired) -> SkippedRun:
        if self.policy.on_conflict == "skip" and self.may_skip:
            return SkippedRun.made(str(refusal.name), Skip.HELD, refusal.holder)
        if self.policy.on_conflict == "retry" and not self.is_called_directly:
            self._retry_later(refusal)
        raise refusal

    def _retry_later(self, refusal: LockNotAcquired) -> None:
        """Publish the next try and raise `Retry`; return after too many tries."""
        tries = duplicates.number(self.request, CONFLICTS)
        if tries >= self.policy.max_conflict_retries or self._is_nested():
            return
        countdown = random.uniform(0, self.policy.pause(tries))
        following = duplicates.again(self, countdown, {CONFLICTS: tries + 1})
        if not self.request.is_eager:
            try:
                following.apply_async()
            except Exception as exc:
                # As Celery does: the broker moves the message to the dead letters.
                raise Reject(exc, requeue=False) from exc
        raise Retry(
            str(refusal),
            exc=refusal,
            when=countdown,  # type: ignore[arg-type]
            is_eager=self.request.is_eager,
            sig=following,
        )


def wrap(single: Single) -> Callable[..., Any]:
    """Return the function that Celery calls instead of the task's own."""

    @wraps(single.function)
    def run(*args: Any, **kwargs: Any) -> Any:
        converting = _converting.get()
        if converting is None or converting.single is not single:
            return Run(single, args, kwargs).perform()
        # A run makes this call, with converted arguments. Another one, within the body, is a run.
        _converting.set(None)
        return single.function(*args, **kwargs)

    # Celery checks the arguments of .delay() by it, and doesn't follow __wrapped__.
    run.__signature__ = single.signature  # type: ignore[attr-defined]
    setattr(run, MARK, single)
    single.wrapper = run
    return run


def outcome(error: BaseException, task: Any, request: Any) -> str:
    """
    Return how a body ended that raised `error`.

    Empty if it didn't end: its process is being killed, or its message goes back to the queue.
    """
    if isinstance(error, Ignore):
        return "ignored"
    goes_back = isinstance(error, Reject) and getattr(error, "requeue", False)
    if goes_back or not isinstance(error, Exception):
        return ""
    is_retried = isinstance(error, Retry) or _is_retried(error, task, request)
    return "retry" if is_retried else "failure"


def _is_retried(error: Exception, task: Any, request: Any) -> bool:
    """Return whether Celery's autoretry_for will retry the task."""
    if request is None or request.called_directly:
        return False
    retried, others = (
        isinstance(error, tuple(getattr(task, option, ())))
        for option in ("autoretry_for", "dont_autoretry_for")
    )
    most = getattr(task, "retry_kwargs", {}).get("max_retries", task.max_retries)
    most = getattr(task, "override_max_retries", most)
    return retried and not others and (most is None or request.retries < most)


def _request_of(task: Any) -> Any:
    """Return Celery's request; only its id if no message caused the call."""
    request = task.request
    # In the body of a message, Celery gives a call of the same task the message's request, or a
    # copy: with its headers, its chain and its retries.
    if any(outer.task is task and outer.request.id == request.id for outer in _running.get()):
        return Context(id=request.id)
    return request
