"""What the Redis backend does on Redis alone: keys, scripts, and the line of those who wait."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from ..conf import AliasConfig
from ..core import runtime
from ..core.identity import Owner, Process
from ..lease import Lease
from . import redis_client
from .base import Request
from .redis_client import Client, Mailbox, Mailboxes, RedisError
from .redis_lines import ask_many, lines
from .redis_scripts import (
    ACQUIRE,
    BEAT,
    EXTEND,
    GATE,
    LEAVE,
    RECHECK,
    RELEASE,
    RENEW,
    REPAIR,
    TAKE_AWAY,
)

logger = logging.getLogger(__name__)

#: So many leases are renewed by one script, and nobody else is served meanwhile.
AT_ONCE = 100


class Keys(NamedTuple):
    """The keys of one lock, all in one slot of a cluster."""

    lock: str
    seq: str
    queue: str
    alive: str

    @classmethod
    def of(cls, prefix: str, name: str) -> Keys:
        whole = f"{prefix or 'fencedlock'}:{name}"
        tag = f"{{{whole}}}"
        if "}" in whole:
            # A tag ends at its first closing brace, and an empty one is none.
            tag = f"{{{blake2b(whole.encode(), digest_size=16).hexdigest()}}}:{whole}"
        return cls(f"{tag}:lock", f"{tag}:seq", f"{tag}:queue", f"{tag}:alive")

    def mailbox(self, owner: Owner) -> str:
        return f"{self.queue}:{owner.id}"


class KeyHolder(NamedTuple):
    """What the key of a lock says."""

    owner: str = ""
    token: int = 0
    process: Process = Process()
    words: str = ""

    @classmethod
    def read(cls, value: bytes | str | None) -> KeyHolder:
        """What a value says; of one that isn't ours, nothing."""
        owner, token, told = [*_text(value).split(":", 2), "", ""][:3]
        if not token.isdecimal():
            return cls()
        # He whom it was handed to tells nothing until he has claimed it.
        place, mark, words = told.partition(_AFTER_PLACE)
        return cls(owner, int(token), Process.read(place), words if mark else told)


_AFTER_PLACE = " = "


#: Who has a lock, and for how many milliseconds.
Told = tuple[KeyHolder, int]


class InLine(NamedTuple):
    """
    A refused owner's place: how long to sleep at most, and when he came, for the next try.

    And who had the lock, as far as it is known.
    """

    pause: float
    arrival: str
    held: KeyHolder


class _Link:
    """A client, connections to ask on, and others to wait on."""

    def __init__(self, client: Client, *, is_ours: bool) -> None:
        self.client = client
        self._is_ours = is_ours
        self._lines = lines(client) if is_ours else None
        #: Who is asked to run scripts.
        self.asked: Any = self._lines or client
        self.mailboxes = Mailboxes(client)
        self.waiting = 0

    def close(self) -> None:
        """Close what is idle, but not what belongs to others."""
        self.mailboxes.close()
        if self._lines:
            self._lines.close()
        if self._is_ours:
            self.client.connection_pool.disconnect(inuse_connections=False)


class Store:
    """The locks of one alias, as far as Redis knows them. Raises `RedisError`."""

    def __init__(self, config: AliasConfig, timeout: float) -> None:
        self._config = config
        self._timeout = timeout
        self.forget_after_fork()

    def forget_after_fork(self) -> None:
        # The driver shuts no socket down that another process opened.
        self._lock = runtime.allocate_lock()
        self._links: dict[object, _Link] = {}

    def claim(self, request: Request, arrival: str | None = None) -> int | InLine:
        """
        Take the lock if it is free, or was handed to this owner; returns the token.

        Args:
            arrival: To stand in line if refused: "0", later what was told before.
        """
        keys = self._keys(request.name)
        waits = () if arrival is None else (arrival,)
        answer = ACQUIRE.run(self._link.asked, keys, *_terms(request), *waits)
        if not isinstance(answer, list):
            return int(answer)
        milliseconds, arrival, handed, held = answer
        self._recheck(keys, handed)
        # A key without an end is none of ours: somebody set it by hand.
        pause = BEAT if milliseconds < 0 else min(BEAT, milliseconds / 1000 + 0.002)
        return InLine(pause, _text(arrival), KeyHolder.read(held))

    def leave(self, request: Request) -> int | None:
        """Leave the line; returns the token if the lock came at the last moment."""
        token = LEAVE.run(self._link.asked, self._keys(request.name), *_terms(request))
        return None if token is None else int(token)

    def give_back(self, name: str, owner: str) -> bool:
        """Have `owner` hold nothing, and wait for nothing any more; whether he had the lock."""
        keys = self._keys(name)
        answer = RELEASE.run(self._link.asked, keys, owner)
        self._recheck(keys, answer)
        return bool(answer != 0)

    def take_away(self, name: str, owner: str, token: int) -> bool:
        """Free the lock, or hand it on, so that `owner` can't renew it; False if it isn't his."""
        keys = self._keys(name)
        answer = TAKE_AWAY.run(self._link.asked, keys, owner, token)
        self._recheck(keys, answer)
        return bool(answer != 0)

    def repair(self, request: Request, recorded: int) -> int | None:
        """Draw a token newer than `recorded`; None if the lock isn't this owner's any more."""
        keys, (owner, ttl, words, _) = self._keys(request.name), _terms(request)
        token = REPAIR.run(self._link.asked, keys, owner, ttl, words, recorded, recorded + 1)
        return None if token is None else int(token)

    def renew(self, leases: Sequence[Lease]) -> list[bool | Exception]:
        """Renew leases in one batch: whether each was, or why that one couldn't be asked."""
        extended = self._extend(leases)
        rest = [lease for lease in leases if lease not in extended]
        calls = [(self._keys(lease.name)[:2], _renewal(lease)) for lease in rest]
        answers = dict(zip(rest, RENEW.run_many(self._link.asked, calls), strict=True))
        found = [answers.get(lease, True) for lease in leases]
        return [each if isinstance(each, Exception) else bool(each) for each in found]

    def _extend(self, leases: Sequence[Lease]) -> set[Lease]:
        """Renew those whose keys say so, many by one request; returns them."""
        if redis_client.is_cluster(self.client):
            return set()
        batches = [leases[start : start + AT_ONCE] for start in range(0, len(leases), AT_ONCE)]
        calls = []
        for batch in batches:
            asked = [lease.asked_with or self._asked_with(lease) for lease in batch]
            ttls = map(_milliseconds, batch)
            terms = [
                term for (_, head), ttl in zip(asked, ttls, strict=True) for term in (head, ttl)
            ]
            calls.append(([key for key, _ in asked], terms))
        extended = set()
        for batch, answer in zip(batches, EXTEND.run_many(self._link.asked, calls), strict=True):
            # An error may be about one lease alone, or a proxy may have a cluster behind it.
            told = "" if isinstance(answer, Exception) else _text(answer)
            extended |= {lease for lease, each in zip(batch, told, strict=False) if each == "1"}
        return extended

    def _asked_with(self, lease: Lease) -> tuple[str, str]:
        """The key of its lock, and what that begins with: made once, and used each second."""
        lease.asked_with = found = self._keys(lease.name).lock, _head(lease)
        return found

    def release(self, lease: Lease) -> bool:
        """Free the lock, or hand it on; False if somebody else came before."""
        keys = self._keys(lease.name)
        answer = RELEASE.run(self._link.asked, keys, lease.owner_id, _token(lease))
        with contextlib.suppress(*RedisError):
            self._recheck(keys, answer)
        return bool(answer != 0)

    def verify(self, lease: Lease) -> bool:
        """Whether the lock is the lease's, or has run out and nobody came since."""
        keys = self._keys(lease.name)
        held, drawn = map(_text, self.client.mget(keys.lock, keys.seq))
        if held:
            return held.startswith(_head(lease))
        return lease.fenced and int(drawn.partition(":")[0] or 0) <= lease.token

    def is_free(self, name: str) -> bool:
        return not self.client.exists(self._keys(name).lock)

    def held(self, name: str) -> Told | None:
        """Who has the lock, and for how many milliseconds."""
        return self.held_by([name])[name]

    def held_by(self, names: Sequence[str]) -> dict[str, Told | None]:
        """What the keys of many locks say, in one batch."""
        keys = [self._keys(name).lock for name in names]
        answers = self._ask_many([(word, key) for key in keys for word in ("GET", "PTTL")])
        held = map(KeyHolder.read, answers[::2])
        return {
            name: (each, milliseconds) if each.owner else None
            for name, each, milliseconds in zip(names, held, answers[1::2], strict=True)
        }

    def waiting(self, names: Sequence[str]) -> dict[str, int]:
        """The lengths of many lines, in one batch."""
        commands = [("ZCARD", self._keys(name).queue) for name in names]
        return dict(zip(names, self._ask_many(commands), strict=True))

    def _ask_many(self, commands: Sequence[tuple[str, ...]]) -> list[Any]:
        answers = ask_many(self._link.asked, commands)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    @contextlib.contextmanager
    def mailbox(self, request: Request) -> Iterator[Mailbox]:
        """Where a waiter is told that the lock may be his."""
        link = self._link
        key = self._keys(request.name).mailbox(request.owner)
        link.waiting += 1
        try:
            with link.mailboxes.open(key, request.cancel) as mailbox:
                yield mailbox
        finally:
            link.waiting -= 1

    def close_idle_mailboxes(self) -> None:
        """Close the connections for waiting if nobody waits."""
        for link in [*self._links.values()]:
            if not link.waiting:
                link.mailboxes.close()

    def close(self) -> None:
        """Close what is idle."""
        for link in [*self._links.values()]:
            link.close()

    @property
    def client(self) -> Client:
        return self._link.client

    @property
    def _link(self) -> _Link:
        hub = _hub()
        found = self._links.get(hub)
        if found is None:
            with self._lock:
                found = self._links.get(hub)
                if found is None:
                    client = redis_client.make_client(self._config, self._timeout)
                    if hub is not None:
                        client = redis_client.with_own_pool(client)
                    is_ours = redis_client.is_ours(self._config)
                    found = self._links[hub] = _Link(client, is_ours=is_ours)
        return found

    def _recheck(self, keys: Keys, handed: Any) -> None:
        """
        See to it that the one whom the lock was handed to is there, else hand it on.

        He is, if he stood in his blocking pop. Who gave a sign of life just now may not have
        reached it yet.
        """
        while isinstance(handed, list) and handed and handed[2] >= GATE:
            handed = RECHECK.run(self._link.asked, keys, _text(handed[0]), _text(handed[1]))

    def _keys(self, name: str) -> Keys:
        return Keys.of(self._config.key_prefix, name)


def _hub() -> object:
    """
    What the connections of this code can't be shared beyond; None for the whole process.

    A socket of gevent belongs to the thread whose hub waits for it, and the keeper has another.
    """
    gevent = sys.modules.get("gevent.monkey")
    if gevent is None or not gevent.is_module_patched("socket"):
        return None
    return gevent.get_original("_thread", "get_ident")()


def _terms(request: Request) -> tuple[str, int, str, int]:
    """The arguments of the scripts that grant."""
    owner = request.owner
    return owner.id, math.ceil(request.ttl * 1000), _words(owner), int(request.fenced)


def _renewal(lease: Lease) -> tuple[str, int, str, int]:
    return lease.owner_id, _milliseconds(lease), _words(lease.holder), _token(lease)


def _milliseconds(lease: Lease) -> int:
    return math.ceil(lease.ttl * 1000)


def _head(lease: Lease) -> str:
    """What the key of the lock begins with as long as it is the lease's."""
    return f"{lease.owner_id}:{_token(lease)}:"


def _words(owner: Owner) -> str:
    return f"{owner.process}{_AFTER_PLACE}{owner}"


def _token(lease: Lease) -> int:
    """The lease's token as the key has it."""
    return lease.token if lease.fenced else 0


def _text(value: bytes | str | None) -> str:
    """A value as text, whether the client decodes answers or not."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
