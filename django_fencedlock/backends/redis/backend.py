"""The Redis backend: a lock is a key with an expiry, and waiters queue in the order of arrival."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from ... import logs
from ...conf import AliasConfig, Problem
from ...core import runtime
from ...core.runtime import clock
from ...exceptions import BackendUnavailable
from ...problems import clock_problem, ok
from ...storage.text import shorten_error
from ..interface import SHARED, Backend, Claim, Grant, Granted, Held, Renewal, Wait, grant_of
from .client import Client, RedisError, is_cluster, make_client, settings_problems
from .connections import Connections
from .scripts import (
    ACQUIRE,
    ACQUIRE_ALL,
    BEAT,
    GATE,
    LATER,
    LOOK,
    RECHECK,
    RELEASE,
    RELEASE_ALL,
    RENEW,
    SUGGEST,
    WAKE,
    Keys,
    Script,
)
from .scripts_shared import ACQUIRE_SHARED, HOLDS_SHARED

logger = logging.getLogger(__name__)


class _Refusal(NamedTuple):
    """The answer of ACQUIRE to a claim that was refused."""

    held: Held
    #: The place in the queue; empty if the claim has none.
    arrival: str
    #: How many wait before it.
    before: int


_RENEWALS: Mapping[object, Renewal] = {0: Renewal.LOST, 1: Renewal.KEPT}


class RedisBackend(Backend):
    """
    Locks on Redis or Valkey.

    An uncontended acquire is one request, a release is one, and so is a renewal of 250 leases.

    With T for OPTIONS["TIMEOUT"], a request ends after T if the server doesn't answer, and a
    waiter's after T, a beat and a second. For a client from CACHE or CLIENT_FACTORY, T is what that
    client's own time limits and retries make it.

    Permits and readers wait in the queue of their name. Readers get in together, up to the next
    writer. If a writer stops waiting, the readers behind it notice within a beat.

    A waiter that dies delays those behind it by a few milliseconds. If it dies just as it gets the
    lock, it delays them by three seconds at most (`scripts.CLAIM`). A live one that is slow, or
    stopped, between two requests may be taken for dead (`scripts.GATE`): it loses one turn to the
    next waiter, and keeps its place.

    Each request of a waiter for one of N permits has 2 * N + 1 keys: 2,001 keys every two seconds
    with limit=1000, and a look-up of 2,000. An uncontended acquire of a permit has three keys.
    """

    label = "redis"
    supports_waiting = True
    supports_any = True
    supports_shared = True
    option_names = frozenset({"CACHE", "CLIENT_FACTORY", "TIMEOUT"})

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        self._keys = lru_cache(1024)(partial(Keys.of, config.key_prefix))
        self._keys_of = lru_cache(64)(self._keys_of_permits)
        self.after_fork()
        runtime.forks.register(self)

    def after_fork(self) -> None:
        # The driver shuts down no socket that another process opened.
        self._connections = runtime.PerHub(lambda: Connections(make_client(self.config)))

    def acquire(self, claim: Claim, wait: Wait) -> Granted | Held:
        answer = self.acquire_any([claim], wait)
        return answer if isinstance(answer, Held) else answer[1]

    def acquire_any(self, claims: Sequence[Claim], wait: Wait) -> tuple[Claim, Granted] | Held:
        """
        Take one of several permits: the first free one, in the order of the claims.

        All waiters of one name have one queue. A permit goes to the first live waiter that asked
        for it. So waiters with the same limit are served in the order of arrival, and a waiter
        with a lower limit doesn't keep one behind it from a permit above that limit.
        """
        answer = self._claim(claims, "0" if wait.left else "")
        if not isinstance(answer, _Refusal):
            return answer
        return self._queue(claims, wait, answer) if answer.arrival else answer.held

    def _claim(self, claims: Sequence[Claim], arrival: str) -> tuple[Claim, Granted] | _Refusal:
        """
        Run ACQUIRE.

        Args:
            arrival: To queue if refused: "0", later the arrival that the last refusal returned.
        """
        claim = claims[0]
        if len(claims) == 1:
            keys: Sequence[str] = self._keys(claim.name)
        else:
            keys = self._keys_of(tuple([each.name for each in claims]))
        fenced = "1" if claim.fenced else "0"
        terms = [claim.owner, _milliseconds(claim.ttl), claim.identity, fenced]
        if arrival:
            terms.append(arrival)
        since = clock()
        script = ACQUIRE_SHARED if claim.shared else ACQUIRE
        answer = self._run("acquire", claim.name, script, keys, *terms)
        if isinstance(answer, list):
            expires, place, before, handed, value = answer
            for which, *given in handed:
                self._recheck(self._keys(claims[which - 1].name), given)
            return _Refusal(_read_lock(value, expires), _text(place), before)
        token, _, which = _text(answer).partition(":")
        return claims[int(which) - 1], _granted(claim, token, since)

    def _keys_of_permits(self, names: tuple[str, ...]) -> Sequence[str]:
        """Return the keys of permits of one name, as ACQUIRE takes them."""
        locks, queues, counters = zip(*map(self._keys, names), strict=True)
        return (*locks, queues[0], *counters)

    def _queue(
        self, claims: Sequence[Claim], wait: Wait, refusal: _Refusal
    ) -> tuple[Claim, Granted] | Held:
        """Wait for messages until a lock is granted or the wait is over."""
        mailbox = f"{self._keys(claims[0].name).queue}:{claims[0].owner}"
        wait.on_cancel(partial(self._wake, mailbox))
        try:
            while refusal.arrival:
                held = refusal.held
                wait.refused(held)
                pause = BEAT if held.expires_in is None else held.expires_in + 0.002
                if refusal.before:
                    pause += LATER
                self._here.pop(mailbox, min(BEAT, pause, wait.left))
                # The last request leaves the queue, unless it gets the lock.
                answer = self._claim(claims, refusal.arrival if wait.left else "")
                if not isinstance(answer, _Refusal):
                    return answer
                refusal = answer
            return refusal.held
        except BackendUnavailable:
            raise
        except BaseException:
            with contextlib.suppress(BackendUnavailable):
                self.release_all([Grant(each.name, each.owner, fenced=False) for each in claims])
            raise

    def acquire_all(self, claims: Sequence[Claim]) -> list[Granted] | dict[str, Held]:
        """Take all locks or none, in one script; in a Cluster, one after the other."""
        if is_cluster(self._here.client) or any(each.shared for each in claims):
            return self._acquire_each(claims)
        keys = [key for each in claims for key in self._keys(each.name)]
        terms = [_milliseconds(claims[0].ttl)]
        for each in claims:
            terms += each.owner, each.identity, "1" if each.fenced else "0"
        since = clock()
        answers = self._run("acquire", claims[0].name, ACQUIRE_ALL, keys, *terms)
        found = list(zip(claims, answers, strict=True))
        refused: dict[str, Held] = {}
        for claim, answer in found:
            if isinstance(answer, list):
                expires, handed, value = answer
                self._recheck(self._keys(claim.name), handed)
                refused[claim.name] = _read_lock(value, expires)
        if not refused:
            return [_granted(claim, _text(token), since) for claim, token in found]
        # It was sent twice, and meanwhile the others expired.
        self.release_all([grant_of(claim) for claim, answer in found if answer == 1])
        return refused

    def _acquire_each(self, claims: Sequence[Claim]) -> list[Granted] | dict[str, Held]:
        answer = super().acquire_all(claims)
        if isinstance(answer, dict):
            # It tried none after the first that was refused.
            names = [each.name for each in claims]
            last = max(map(names.index, answer))
            answer |= self.holders(names[last + 1 :])
        return answer

    def _wake(self, mailbox: str) -> None:
        """Send a waiter a message, from another thread: this one may run an event loop."""

        def push() -> None:
            with contextlib.suppress(*RedisError):
                self._here.run(WAKE, [mailbox])

        # RuntimeError: the interpreter exits. The waiter notices after a beat.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=push, daemon=True).start()

    def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        calls = []
        for each in grants:
            keys = self._keys(each.name)
            calls.append(((keys.lock, keys.counter), (_value(each), _milliseconds(each.ttl))))
        answers = self._here.run_batch(RENEW, calls)
        if failed := [answer for answer in answers if isinstance(answer, Exception)]:
            why = shorten_error(failed[0])
            runtime.notify(
                logger.warning,
                "Redis of alias %r could not renew %d of %d leases: %s",
                *(self.config.alias, len(failed), len(grants), why),
                extra=logs.facts(alias=self.config.alias, reason=why),
            )
        return [_RENEWALS.get(answer, Renewal.UNKNOWN) for answer in answers]

    def release(self, grant: Grant) -> bool:
        keys = self._keys(grant.name)
        answer = self._run("release", grant.name, RELEASE, keys, *_terms_of_release(grant))
        if isinstance(answer, list):
            self._recheck(keys, answer)
        return bool(answer != 0)

    def release_all(self, grants: Sequence[Grant]) -> list[bool]:
        keys = [self._keys(each.name) for each in grants]
        calls = list(zip(keys, map(_terms_of_release, grants), strict=True))
        answers = self._here.run_batch(RELEASE_ALL, calls)
        for each, answer in zip(keys, answers, strict=True):
            if isinstance(answer, list):
                self._recheck(each, answer)
        for grant, answer in zip(grants, answers, strict=True):
            if isinstance(answer, Exception):
                raise self.unavailable("release", answer, grant.name) from answer
        return [answer != 0 for answer in answers]

    def _recheck(self, keys: Keys, handed: Any) -> None:
        """
        Pass the lock on while the waiter that got it doesn't wait.

        A waiter that is blocked on its mailbox was woken. One whose heartbeat is younger than GATE
        may not be blocked yet.
        """
        # Without an answer, the waiter has the lock until its claim is over.
        with contextlib.suppress(*RedisError):
            while handed and handed[2] >= GATE:
                handed = self._here.run(RECHECK, keys, _text(handed[0]), _text(handed[1]))

    def verify(self, grant: Grant) -> bool:
        keys, counter = self._keys(grant.name), _counter(grant)
        if grant.shared:
            return bool(self._run("verify", grant.name, HOLDS_SHARED, [keys.lock], _value(grant)))
        try:
            held, drawn = map(_text, self._here.execute("MGET", keys.lock, keys.counter))
        except RedisError as exc:
            raise self.unavailable("verify", exc, grant.name) from exc
        # An expired lease is the owner's if no other came since, as in RENEW.
        return held == _value(grant) if held else bool(counter) and drawn in ("", counter)

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        calls = [((keys.lock, keys.queue), ()) for keys in map(self._keys, names)]
        answers = self._here.run_batch(LOOK, calls)
        for answer in answers:
            if isinstance(answer, Exception):
                raise self.unavailable("look up locks", answer) from answer
        found = zip(names, answers, strict=True)
        return {name: _read_holders(*answer) for name, answer in found if answer[1] is not None}

    def suggest(self, name: str, floor: int) -> None:
        self._run("suggest a token for", name, SUGGEST, [self._keys(name).counter], str(floor))

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        yield from settings_problems(config)

    def check(self) -> Iterator[Problem]:
        try:
            yield from server_problems(self._here.client, self.config.alias)
        except RedisError as exc:
            remedy = "Start the server, or correct the settings of the alias."
            yield Problem("E013", str(self.unavailable("answer", exc)), remedy)

    def close(self) -> None:
        for connections in self._connections.all():
            connections.close()

    @property
    def _here(self) -> Connections:
        """The connections that this code can use."""
        return self._connections.get()

    def _run(self, doing: str, name: str, script: Script, keys: Sequence[str], *args: str) -> Any:
        try:
            return self._here.run(script, keys, *args)
        except RedisError as exc:
            raise self.unavailable(doing, exc, name) from exc


def _milliseconds(seconds: float) -> str:
    return str(math.ceil(seconds * 1000))


def _granted(claim: Claim, token: str, since: float) -> Granted:
    """Return the answer to a claim that got the lock; the token is 0 if it isn't fenced."""
    value = f"{claim.owner}:{token}:{claim.identity}"
    return Granted(int(token) if claim.fenced and not claim.shared else None, since, value)


def _value(grant: Grant) -> str:
    """Return the lock key's value while the grant holds the lock."""
    # The core may have given the grant another token. Another process's grant has no handle.
    token = SHARED if grant.shared else grant.token or 0
    return grant.handle or f"{grant.owner}:{token}:{grant.identity}"


def _counter(grant: Grant) -> str:
    """Return the counter if no other owner came since; empty if unfenced, or if unknown."""
    owner, token, _ = _value(grant).split(":", 2)
    return "" if token == "0" else f"{token}:{owner}"


def _terms_of_release(grant: Grant) -> tuple[str, str]:
    if grant.shared:
        return grant.owner, f"-{_value(grant)}"
    return grant.owner, _counter(grant) if grant.fenced else "-"


def _read_lock(value: bytes | str | None, expires: int, waiting: int | None = None) -> Held:
    """Return who holds a lock, by the value of its key and the milliseconds until it expires."""
    owner, token, identity = [*_text(value).split(":", 2), "", ""][:3]
    expires_in = expires / 1000 if expires >= 0 else None
    if token == SHARED:
        return Held(owner, identity, None, expires_in, waiting, shared=True)
    if not token.isdecimal():
        # The key was set by other software.
        return Held(expires_in=expires_in, waiting=waiting)
    return Held(owner, identity, int(token) or None, expires_in, waiting)


def _read_holders(waiting: int, *found: Any) -> Held:
    """Return who holds a lock, by what LOOK found."""
    pairs = zip(found[::2], found[1::2], strict=True)
    first, *others = (_read_lock(*each, waiting) for each in pairs)
    return first._replace(others=tuple(others))


def _text(value: bytes | str | None) -> str:
    """Return a value as text, whether the client decodes answers or not."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


# What `check --database` and the doctor ask the servers.

#: The oldest version whose commands the scripts use.
OLDEST = (6, 2)
#: The part of maxmemory that may be used.
FULL = 0.9

_FENCED = "still runs. Tokens still rise, and fenced writes are still rejected."
_OWN_SERVER = "or use a separate server for locks."


def server_problems(client: Client, alias: str) -> Iterator[Problem]:
    """Look at version, memory, persistence, replicas and clock of each server."""
    where = f"The Redis of FENCEDLOCK[{alias!r}]"
    if is_cluster(client):
        for node in client.get_primaries():
            yield from node_problems(f"{where} (node {node.name})", client, target_nodes=node)
        return
    yield from node_problems(where, client)
    if client.info("cluster").get("cluster_enabled"):
        what = f"{where} is one node of a Cluster: locks of the other nodes fail."
        remedy = "Give a function that returns a redis.RedisCluster as OPTIONS['CLIENT_FACTORY']."
        yield Problem("E017", what, remedy)


def node_problems(where: str, client: Client, **target: Any) -> Iterator[Problem]:
    """Look at one server; `where` names it in messages."""
    info = client.info(**target)
    version = str(info.get("redis_version", "unknown"))
    # Valkey reports that it is Redis 7.2, beside its own version.
    if "valkey_version" in info:
        yield ok(f"{where} is Valkey {info['valkey_version']}.")
    elif tuple(map(int, re.findall(r"\d+", version)[:2])) >= OLDEST:
        yield ok(f"{where} is Redis {version}.")
    else:
        remedy = "Use Redis 6.2 or newer, or Valkey."
        yield Problem("E014", f"{where} has version {version}.", remedy)
    before, began = time.time(), clock()
    seconds, micros = client.time(**target)
    ahead = seconds + micros / 1e6 - before - (clock() - began) / 2
    found = clock_problem(ahead, f"{where}: ")
    yield Problem("W005", found.message, found.hint) if found.id else found
    limit, policy = info.get("maxmemory", 0), info.get("maxmemory_policy", "noeviction")
    if limit and policy != "noeviction":
        what = f"{where} drops keys when it is full (maxmemory-policy {policy}): a dropped lock is"
        remedy = f"Set maxmemory-policy to noeviction, {_OWN_SERVER}"
        yield Problem("W002", f"{what} free for the next owner. Tokens stay right.", remedy)
    elif (used := info.get("used_memory", 0)) > FULL * limit > 0:
        what = f"{where} uses {used / limit:.0%} of its maxmemory, and refuses writes at 100%."
        yield Problem("W006", what, f"Raise maxmemory, {_OWN_SERVER}")
    for key in ("rdb_last_bgsave_status", "aof_last_write_status"):
        if info.get(key, "ok") != "ok":
            what = f"{where} reports that {key} is {info[key]}, and may refuse every write."
            yield Problem("W007", what, "Look at its log and its disk.")
    if info.get("aof_enabled"):
        yield ok(f"{where} keeps an append-only file.")
    else:
        yield _without_append_only(where, client, **target)
    if info.get("role") == "slave":
        remedy = "Name the primary, or a Sentinel that knows it."
        yield Problem("W008", f"{where} is a replica.", remedy)
    elif count := info.get("connected_slaves"):
        what = f"{where} has replicas ({count}), which can lag: after a failover a lock can be"
        yield Problem("I003", f"{what} granted again while its holder {_FENCED}")


def _without_append_only(where: str, client: Client, **target: Any) -> Problem:
    remedy = "Set appendonly to yes if tasks that run twice cost too much."
    saves = True
    # This user may not ask.
    with contextlib.suppress(*RedisError):
        saves = bool(client.config_get("save", **target).get("save", True))
    if saves:
        what = f"{where} keeps snapshots at most: after a crash a new lock is free while its holder"
        return Problem("I002", f"{what} {_FENCED}", remedy)
    what = f"{where} keeps nothing on disk: after a restart every lock is free while its holder"
    return Problem("I001", f"{what} {_FENCED}", remedy)
