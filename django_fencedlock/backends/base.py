"""What a lock backend is asked for, and what it may say of itself."""

from __future__ import annotations

import enum
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import logs, signals
from ..conf import AliasConfig, Problem, unknown
from ..core.identity import Holder, Owner, Process, is_process_gone
from ..exceptions import AliasConflict, BackendUnavailable, InsideTransaction
from ..lease import Lease
from ..storage.errors import describe_error
from ..storage.vendors import Entry

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger(__name__)


class Cancel:
    """Tells a waiting backend that nobody wants its answer any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._hooks: list[Callable[[], object]] = []

    def __bool__(self) -> bool:
        return self._done

    def on_cancel(self, hook: Callable[[], object]) -> None:
        """Call `hook` on cancellation, from the cancelling thread; at once if it is past."""
        with self._lock:
            if not self._done:
                self._hooks.append(hook)
                return
        hook()

    def cancel(self) -> None:
        with self._lock:
            self._done = True
            hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook()


# Each lock makes one, and a grant: frozen ones take five times as long to make.
@dataclass(slots=True)
class Request:
    """One wish for a lock. It may be sent any number of times: the owner makes it idempotent."""

    name: str
    owner: Owner
    ttl: float
    fenced: bool = True
    #: Seconds that are left to the caller for waiting. A try isn't to take much longer; 0 if he
    #: doesn't wait for a holder.
    timeout: float = 0.0
    cancel: Cancel = field(default_factory=Cancel)
    #: Who was in the way at a try that didn't wait, for a backend to note that read it anyhow.
    seen: list[Holder] = field(default_factory=list)
    #: For the service, not the backend: called once the first try was refused, with the holder if
    #: the backend read it. What it raises ends the request, which then isn't counted as a conflict.
    on_refusal: Callable[[Sequence[Holder]], object] | None = None
    #: Record the grant on this connection rather than on a private one (within a test's own
    #: transaction nobody else would see its tables, and nothing may outlive it). The service says
    #: so, and the next.
    connection: BaseDatabaseWrapper | None = None
    #: The caller is inside a transaction on the fence database.
    in_transaction: bool = False
    #: In a test it stands for a request of another process, which isn't inside the transaction of
    #: the code under test.
    of_another_process: bool = False
    #: Of one who stands in line since his try was refused: what `wait()` is to know of it.
    place: list[Any] = field(default_factory=list)

    @property
    def will_wait(self) -> bool:
        """Whether he who is refused waits at once: nothing is asked, or may fail, in between."""
        return self.timeout > 0 and self.on_refusal is None and self.connection is None


@dataclass(slots=True)
class Grant:
    """A granted request."""

    #: The recorded fencing token; None if unfenced.
    token: int | None
    #: The local clock from *before* the request was sent that the service granted.
    since: float
    #: Kept as ``lease.handle`` for the backend alone.
    handle: Any = None


class Renewal(enum.Enum):
    """What became of one lease in a batch of renewals."""

    KEPT = "the service renewed it"
    LOST = "the service refused it"
    UNKNOWN = "the service couldn't be asked"


class Taken(enum.Enum):
    """What became of a lock that was to be taken away from its holder."""

    FREED = "it is free, or whoever waits has it"
    NOT_HIS = "the holder didn't have it any more"
    LEFT_TO_HOLDER = "the holder gives it back when it is next renewed"


class Backend(ABC):
    """
    One lock service.

    Methods may be called from any thread, several at once. Each raises `BackendUnavailable`
    within a bounded time when the service doesn't answer, and never says "granted" on a guess.
    """

    #: A short word for the registry and the admin.
    label: str
    #: `wait()` waits in the service, in order of arrival; else the lock tries again and again.
    supports_waiting = False
    #: A lease runs out by itself when it isn't renewed; else the lock lives as long as a session.
    supports_ttl = True
    #: Unfenced locks are in the registry from their grant on; else once they were renewed.
    records_unfenced = False
    #: `acquire()` and `renew()` write the registry in the request that they send anyhow. Else
    #: another thread than the one that renews calls `renew_rows()` and `tidy()`.
    records_grants = False
    #: It keeps others out. Only what switches locks off for a test doesn't.
    excludes = True
    #: Keys of OPTIONS that the backend knows.
    option_names: frozenset[str] = frozenset()

    def __init__(self, config: AliasConfig) -> None:
        self.config = config
        #: Called with the ids of owners whose session died, as soon as that is noticed. It never
        #: waits, and runs no code of the user's.
        self.lost_hook: Callable[[Sequence[str]], object] | None = None

    @abstractmethod
    def acquire(self, request: Request) -> Grant | None:
        """
        Try once. None if somebody else holds the lock.

        He who `will_wait` may stand in line from then on. He has a `request.place` if so, and
        `wait()` is called whatever time is left, or `abandon()`.
        """

    def wait(self, request: Request, timeout: float) -> Grant | None:
        """
        Wait in line for up to `timeout` seconds; None if time ran out or it was cancelled.

        He has left the line then, or if it raises.
        """
        raise NotImplementedError

    @abstractmethod
    def is_free(self, name: str) -> bool:
        """Look, cheaply, whether a try is worth it. A hint, and never a grant."""

    @abstractmethod
    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        """
        Renew `leases`, each by its own ttl from now, in one batch; answers in their order.

        Asks the lock service alone: other leases are renewed after its answer.
        """

    def renew_rows(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        """
        Renew the rows of leases that the service has renewed; where it keeps rows elsewhere.

        Returns:
            The leases that a newer grant came after. They are lost, and were released.
        """
        return ()

    @abstractmethod
    def verify(self, lease: Lease) -> bool:
        """Ask whether the lease's owner has the lock."""

    @abstractmethod
    def release(self, lease: Lease) -> bool:
        """Give the lock back; False if this owner no longer had it. Never touches another's."""

    def abandon(self, request: Request) -> None:
        """Free what a request of this process was granted, if it was, whose caller won't know."""
        self.evict(request.name, request.owner.id, fenced=request.fenced)

    @abstractmethod
    def evict(self, name: str, owner: str, *, fenced: bool = True) -> bool:
        """
        Free the lock of an owner whose process is gone; False if he didn't have it.

        Never touches another's lock. Wakes who waits, as a release does. `fenced` tells whether
        there may be a row of the registry to clear as well.
        """

    def evict_if_gone(
        self, name: str, owner: str, process: Process, *, fenced: bool = True
    ) -> bool:
        """
        Free a lock that is in the way if its holder's process is gone; whether that was done.

        For a backend to call that read who has the lock as it was refused.
        """
        if not is_process_gone(process):
            return False
        if not self.evict(name, owner, fenced=fenced):
            return False
        logger.warning(
            "Freed lock %r (alias %r): its holder, process %d of this machine, is gone",
            name,
            self.config.alias,
            process.pid,
            extra=logs.facts(name=name, alias=self.config.alias, owner=owner),
        )
        self.tell_evicted(name, owner, process)
        return True

    def tell_evicted(self, name: str, owner: str, process: Process) -> None:
        """Send the signal for a holder whose lock was freed."""
        facts = {"alias": self.config.alias, "name": name, "owner": owner, "pid": process.pid}
        signals.send(signals.lock_evicted, type(self), **facts)

    def take_away(self, name: str, owner: str, *, token: int | None = None) -> Taken:
        """
        Free the lock of an owner who lives, so that he can't renew it; never another's.

        Wakes who waits, as a release does. His fence was lifted before.

        Args:
            token: The fence's, to be passed by the next grant; None if the lock isn't fenced.
        """
        freed = self.evict(name, owner, fenced=token is not None)
        return Taken.FREED if freed else Taken.NOT_HIS

    def entry_for(self, request: Request) -> Entry:
        """The row of the registry that a request's grant has."""
        return Entry(
            name=request.name,
            alias=self.config.alias,
            backend=self.label,
            owner=request.owner,
            ttl=request.ttl,
            fenced=request.fenced,
        )

    def entry(self, lease: Lease) -> Entry:
        """The row of the registry that a lease would have."""
        return Entry(
            name=lease.name,
            alias=self.config.alias,
            backend=self.label,
            owner=lease.holder,
            ttl=lease.ttl,
            fenced=lease.fenced,
        )

    @abstractmethod
    def holder(self, name: str) -> Holder | None:
        """Tell who has the lock now, by the service's word."""

    def holders(self, names: Sequence[str]) -> dict[str, Holder | None]:
        """Tell who has each of the locks. Override it where one request can tell of many."""
        return {name: self.holder(name) for name in names}

    def waiting(self, names: Sequence[str]) -> dict[str, int]:
        """Tell how many stand in line for each of the locks, where there is a line."""
        return {}

    def tidy(self) -> None:
        """Do what was put off at releases. Called by the thread that calls `renew_rows()`."""

    def close(self) -> None:
        """Let go of connections that hold nothing. The next request opens what it needs."""

    def forget_after_fork(self) -> None:
        """Drop, in a child, all that belongs to the parent, without a word to any server."""

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        """What is wrong with an alias of this backend, without asking a server."""
        for key in config.options:
            if key not in cls.option_names:
                yield Problem(
                    "E008",
                    f"{config.where('OPTIONS')} has an unknown key {key!r}.",
                    unknown(str(key), cls.option_names),
                )

    def live_problems(self) -> Iterator[Problem]:
        """What is wrong with the service itself; asked by ``check --database`` alone."""
        yield from ()

    def diagnose(self) -> Iterator[Problem]:
        """What else a doctor can tell of the service; raises `BackendUnavailable`."""
        yield from ()

    def conflict(self, request: Request, alias: str, label: str, holder: Holder) -> AliasConflict:
        """The error for a name that is live at another lock service."""
        return AliasConflict(
            f"Lock {request.name!r} is held through alias {alias!r} ({label}), and was asked for "
            f"through alias {self.config.alias!r} ({self.label}): two lock services on one name "
            "exclude nobody. Use one alias for the name.",
            name=request.name,
            alias=self.config.alias,
            holder=holder,
        )

    def in_the_way(self, request: Request) -> InsideTransaction:
        """The error for a caller on SQLite whose own transaction keeps a grant from its file."""
        return InsideTransaction(
            f"Lock {request.name!r} can't be acquired here: SQLite has one writer at a time, and "
            "this code is inside a transaction that has the file. Acquire the lock first, and open "
            "the transaction inside of it.",
            name=request.name,
            alias=self.config.alias,
        )

    def unavailable(
        self, doing: str, exc: BaseException, name: str | None = None
    ) -> BackendUnavailable:
        """The error for a service that failed, to be raised from `exc`."""
        about = f" of lock {name!r}" if name is not None else ""
        return BackendUnavailable(
            f"Lock service {self.config.alias!r} ({self.label}) failed at the {doing}{about}: "
            f"{type(exc).__name__}: {describe_error(exc, self.config.fence_database)}",
            name=name,
            alias=self.config.alias,
        )
