"""The backend interface: a lock service excludes and proposes a token; the core does the rest."""

from __future__ import annotations

import contextlib
import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from ..conf import AliasConfig, Problem, unknown
from ..core.runtime import clock
from ..exceptions import BackendUnavailable, InsideTransaction
from ..storage.text import describe_error

#: The owner of the fence while readers hold the lock. An owner id is never this text.
SHARED = "shared"


class Claim(NamedTuple):
    """A request for one lock. It is safe to send it twice: `owner` makes it idempotent."""

    name: str
    #: Unique id of this acquisition.
    owner: str
    ttl: float
    #: Host, process, thread and task of the holder, as text: `core.identity.Owner.identity`. A
    #: service stores it beside the lock and returns it in `Held`. `Owner.read()` parses it.
    identity: str = ""
    fenced: bool = True
    #: A reader's claim. Only if the backend's `supports_shared`; see `Backend.acquire()`.
    shared: bool = False
    #: Of a permit: how many its name has, by `limit=`. The registry shows it.
    permits: int | None = None


class Granted(NamedTuple):
    """The answer to a claim that got the lock."""

    #: The token that the service proposes, or has recorded if it `records_grants`. None if the
    #: service has no rising number, or the claim isn't fenced: the core numbers the grant then.
    #: A reader's is read from the fence, so a proposal is ignored: None unless it was recorded.
    token: int | None
    #: The local clock, read before the request was sent that the service granted.
    since: float
    #: Opaque to the core; passed back in `Grant`. An attribute `session_columns` goes into the
    #: registry row of an unfenced lock.
    handle: Any = None


class Held(NamedTuple):
    """The answer to a claim that another owner refused, or the holder that a look-up found."""

    #: Empty if the service can't tell.
    owner: str = ""
    identity: str = ""
    token: int | None = None
    #: Seconds until the lock expires, if the service knows.
    expires_in: float | None = None
    #: How many owners wait in the service's queue, if it has one.
    waiting: int | None = None
    #: Seconds since the grant, if the service knows.
    held_for: float | None = None
    #: The server process of the session that holds the lock, if a session holds it.
    session_pid: int | None = None
    #: The alias and the backend's label in the registry row that refused, if they are not this
    #: backend's own. The core raises `AliasConflict` then.
    alias: str = ""
    label: str = ""
    #: Whether it is a reader.
    shared: bool = False
    #: The further readers, in what `holders()` returns. A refusal names one reader alone.
    others: tuple[Held, ...] = ()


class Grant(NamedTuple):
    """A granted claim, as it is renewed, verified and released."""

    name: str
    owner: str
    ttl: float = 0.0
    token: int | None = None
    fenced: bool = True
    shared: bool = False
    identity: str = ""
    #: `Granted.handle`; None for another process's grant (eviction, forced release).
    handle: Any = None
    permits: int | None = None

    @property
    def fence_owner(self) -> str:
        """The owner in the fence: all readers have one."""
        return SHARED if self.shared else self.owner


def grant_of(claim: Claim, granted: Granted | None = None) -> Grant:
    """Return the grant of a claim, as a backend is asked about it."""
    return Grant(
        claim.name,
        claim.owner,
        claim.ttl,
        token=granted.token if granted and claim.fenced else None,
        fenced=claim.fenced,
        shared=claim.shared,
        identity=claim.identity,
        handle=granted.handle if granted else None,
        permits=claim.permits,
    )


class Renewal(enum.Enum):
    """What became of one grant in a batch of renewals."""

    KEPT = "the service renewed it"
    LOST = "the service refused it"
    UNKNOWN = "the service did not answer"


@dataclass(slots=True, eq=False)
class Wait:
    """How long an acquire may wait, whether it was cancelled, and what a refusal calls."""

    #: 0 means: try once and do not wait.
    seconds: float = 0.0
    #: A backend that queues calls it at the first refusal, and at least every two seconds while
    #: queued, without leaving the queue. It may release a dead holder's lock, and it may raise:
    #: then the backend leaves the queue and lets the exception through.
    refused: Callable[[Held], object] = lambda held: None
    now: Callable[[], float] = clock
    #: The local clock at the beginning.
    since: float = field(default_factory=clock)
    #: The last refusal, for the error that says who holds the lock. Set by the core.
    held: Held | None = None
    #: The claims that were sent last, if it is one of several permits; of a path, those above its
    #: own, then the one that was refused. Set by the core.
    asked: Sequence[Claim] = ()
    #: An event that cancels the wait once it is set. No hook is called: whatever waits looks at
    #: `left` at least every two seconds.
    cancelled_by: threading.Event | None = None
    #: Whether the core raises if the holder of the lock waits for this very call.
    required: bool = True
    _is_cancelled: bool = field(default=False, init=False)
    _hooks: list[Callable[[], object]] = field(default_factory=list, init=False)

    @property
    def cancelled(self) -> bool:
        return self._is_cancelled or (self.cancelled_by is not None and self.cancelled_by.is_set())

    @property
    def left(self) -> float:
        """Seconds left."""
        return 0.0 if self.cancelled else max(0.0, self.since + self.seconds - self.now())

    def cancel(self) -> None:
        """End the wait, from any thread."""
        self._is_cancelled = True
        for hook in self._hooks:
            hook()

    def on_cancel(self, hook: Callable[[], object]) -> None:
        """Call `hook` when the wait is cancelled, maybe twice; at once if it already is."""
        self._hooks.append(hook)
        if self.cancelled:
            hook()


class Backend(ABC):
    """
    One lock service.

    Methods are called from any thread, concurrently. Each raises `BackendUnavailable` within the
    alias's TIMEOUT (an acquire: after its wait) if the service does not answer, and never reports
    a grant that it is not sure of.
    """

    #: A short word for the registry, the admin and metrics.
    label: ClassVar[str]
    #: acquire() queues in the service, first come first served. Otherwise the core polls.
    supports_waiting: ClassVar[bool] = False
    #: A lock expires with its ttl. Otherwise it lives as long as a session.
    supports_ttl: ClassVar[bool] = True
    #: It has shared (read) locks: acquire() heeds `claim.shared`.
    supports_shared: ClassVar[bool] = False
    #: acquire_any() takes one of several locks in one request. Otherwise the core tries them.
    supports_any: ClassVar[bool] = False
    #: acquire() records the grant in the fence table in the same statement.
    records_grants: bool = False
    #: acquire() writes registry rows of unfenced locks as well.
    records_unfenced: bool = False
    #: It keeps other owners out. Only a backend that switches locks off for tests doesn't.
    excludes: bool = True
    #: Keys of OPTIONS that the backend knows.
    option_names: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: AliasConfig) -> None:
        self.config = config

    @abstractmethod
    def acquire(self, claim: Claim, wait: Wait) -> Granted | Held:
        """
        Take the lock, or return its holder once `wait.left` is 0.

        A backend that `supports_waiting` queues and waits in this one call. Any other tries once.
        If it raises, the core releases the claim by its owner id, now and for a minute.

        With `claim.shared`: readers share the lock, and an exclusive claim (a writer) excludes
        them. A waiting writer stops new readers, and no stream of readers keeps it waiting: a
        backend that doesn't queue notes a writer that waits, for a few seconds from its last try.
        The refusal of a writer names one of the readers. That of a reader names the writer that
        holds the lock or, while one waits, one of the readers; if none is left, that writer. Each
        reader is renewed, verified and released by its own owner id, and expires alone.

        A backend that `records_grants` does the following in one statement or transaction, under a
        lock that the writer's grant takes too; for others the core does it. Read the fence (F, w).
        If w is `SHARED`, the reader's token is F, and the fence stays as it is. A reader must not
        wait for another reader's `lease.atomic()`, which has that row locked by FOR SHARE.
        Otherwise set the fence to (F + 1, `SHARED`), whatever w was, and the token is F + 1.
        """

    @abstractmethod
    def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """
        Extend each grant by its ttl from now, in one batch; answers in the same order.

        `renew([])` is called at each beat while there are doubts: acquires that raised and
        releases that failed. A backend whose session outlives its locks keeps the session then.
        """

    @abstractmethod
    def release(self, grant: Grant) -> bool:
        """
        Release this owner's lock, or its place in the queue. Return False if it had neither.

        Also called for other owners (a dead process, a forced release), then without a handle.
        Never touches another owner's lock.
        """

    @abstractmethod
    def verify(self, grant: Grant) -> bool:
        """Ask the service, linearizably, whether this owner holds the lock."""

    @abstractmethod
    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        """
        Look up the holders of many locks; free locks are left out.

        One of the readers of a lock stands for all of them: the rest are its `others`.
        """

    def suggest(self, name: str, floor: int) -> None:
        """Propose only tokens above `floor`. A hint: services without a counter ignore it."""

    def acquire_all(self, claims: Sequence[Claim]) -> list[Granted] | dict[str, Held]:
        """
        Take all locks or none, without waiting; answers in the order of the claims.

        If one is held, return who holds each lock that was refused, by name. The claims have
        different names, sorted by their bytes, and one ttl. If it raises, the core releases each.
        """
        granted: list[Granted] = []
        with contextlib.ExitStack() as undo:
            for claim in claims:
                answer = self.acquire(claim, Wait())
                if isinstance(answer, Held):
                    return {claim.name: answer}
                granted.append(answer)
                undo.callback(self.release, grant_of(claim, answer))
            undo.pop_all()
        return granted

    def release_all(self, grants: Sequence[Grant]) -> list[bool]:
        """Release many locks of this process, in one batch if the service has one."""
        return [self.release(grant) for grant in grants]

    def acquire_any(self, claims: Sequence[Claim], wait: Wait) -> tuple[Claim, Granted] | Held:
        """
        Take one of several locks, or queue for the first that is released.

        Only called if the backend `supports_any`. The claims are the permits of one name. They
        have the same owner: if it has one of them already, return that one.
        """
        raise NotImplementedError

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        """Problems of the settings, found without asking a server."""
        for key in config.options:
            if key not in cls.option_names:
                what = f"{config.where('OPTIONS')} has an unknown key {key!r}."
                yield Problem("E008", what, unknown(str(key), cls.option_names))
        if "TIMEOUT" in cls.option_names:
            try:
                config.timeout  # noqa: B018
            except (TypeError, ValueError) as exc:
                yield Problem("E003", str(exc))

    def check(self) -> Iterator[Problem]:
        """Problems that only the service can reveal. For `check --database` and doctor."""
        yield from ()

    def close(self) -> None:
        """Close idle connections."""

    def after_fork(self) -> None:
        """Drop inherited connections in a child process, without closing them."""

    def unavailable(
        self, doing: str, exc: BaseException, name: str | None = None
    ) -> BackendUnavailable:
        """
        Return the error for a service that failed, to be raised from `exc`.

        Args:
            doing: What it could not do, with `name` as the object: "release".
        """
        about = f" lock {name!r}" if name is not None else ""
        what = (
            f"Lock service {self.config.alias!r} ({self.label}) could not {doing}{about}: "
            f"{type(exc).__name__}: {describe_error(exc, self.config.fence_database)}"
        )
        return BackendUnavailable(what, name=name, alias=self.config.alias)

    def inside_transaction(self, name: str) -> InsideTransaction:
        """Return the error for a caller whose own transaction has SQLite's file locked."""
        what = (
            f"Lock {name!r} can't be acquired here: SQLite has one writer at a time, and this code "
            "is inside a transaction that has the file. Acquire the lock first, and open the "
            "transaction inside of it."
        )
        return InsideTransaction(what, name=name, alias=self.config.alias)
