"""Redlock: a lock is a key with an expiry on a majority of independent Redis servers."""

from __future__ import annotations

import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from .. import logs
from ..conf import AliasConfig, Problem
from ..core import runtime
from ..core.runtime import clock
from ..problems import ok
from .cell import CellBackend
from .interface import Claim, Grant, Granted, Held, Renewal
from .redis.backend import node_problems
from .redis.client import NODE_FORMS, RedisError, fault_of_url, server_of, url_problems
from .redis.connections import AT_ONCE
from .redis.nodes import Node, Nodes, NoMajority

logger = logging.getLogger(__name__)

#: The part of a ttl and the seconds by which clocks may differ while it lasts.
DRIFT, DRIFT_SECONDS = 0.01, 0.002
#: Longest pauses before an acquire repeats a split vote.
SPLIT_PAUSES = (0.004, 0.008, 0.016, 0.032)
#: Milliseconds for which an expired lock is still its owner's, unless another owner comes. No
#: renewal sets a key that is gone: it would undo a forced release.
KEPT = 60_000

# KEYS     the lock
# ARGV     owner, milliseconds of the key, number of the try and identity
# Returns  1, or the value of the key and the milliseconds that it has left
# A try may come after the next one of its owner, and its own end after it.
TAKE = f"""
local held, head = redis.call('GET', KEYS[1]), ARGV[1] .. ':'
local value = head .. ARGV[3]
if held and string.sub(held, 1, #head) ~= head then
  local left = redis.call('PTTL', KEYS[1])
  if left < 0 or left > {KEPT} then return {{held, left}} end
elseif held and held > value then return 1 end
redis.call('SET', KEYS[1], value, 'PX', ARGV[2])
return 1
"""
# KEYS     locks
# ARGV     owner and milliseconds of each key
# Returns  of each lock 1 if it is the owner's, else 0
# pcall: a key of another type, which other software has set, is an error of its own lock alone.
_EACH = """
local answers = {}
for i, key in ipairs(KEYS) do
  local held, head = redis.pcall('GET', key), ARGV[2 * i - 1] .. ':'
  answers[i] = 0
  if type(held) == 'string' and string.sub(held, 1, #head) == head then
    answers[i] = 1 %s
  end
end
return answers
"""
EXTEND = _EACH % "redis.call('PEXPIRE', key, ARGV[2 * i])"
GIVE = _EACH % "redis.call('DEL', key)"
VERIFY = _EACH % ""
# KEYS     locks
# Returns  of each lock the value of its key and the milliseconds that it has left
LOOK = """
local answers = {}
for i, key in ipairs(KEYS) do
  answers[i] = {redis.pcall('GET', key), redis.call('PTTL', key)}
end
return answers
"""


class RedlockBackend(CellBackend):
    """
    Locks on a majority of independent Redis or Valkey servers.

    A request takes one round trip to all nodes, and at most OPTIONS["TIMEOUT"]. There is no token:
    the core numbers the grants by the fence.
    """

    label = "redlock"
    errors = (NoMajority,)
    option_names = frozenset({"TIMEOUT"})

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        self.after_fork()
        runtime.forks.register(self)

    def after_fork(self) -> None:
        # The driver shuts down no socket that another process opened.
        self._nodes = runtime.PerHub(lambda: Nodes(self.config.locations, self.config.timeout))

    def close(self) -> None:
        for nodes in self._nodes.all():
            for node in nodes.all:
                node.close()

    def take(self, claim: Claim) -> Granted | Held:
        for pause in SPLIT_PAUSES:
            if answer := self._take(claim):
                return answer
            # Several claims at once got a part of the nodes each, and released them. A claim that
            # doesn't wait is refused only if another owner has the lock.
            time.sleep(random.uniform(0, pause))
        return self._take(claim) or Held()

    def _take(self, claim: Claim) -> Granted | Held | None:
        """Return None for a split vote."""
        since, nodes = clock(), self._nodes.get()
        key, ttl, number = self._key(claim.name), _milliseconds(claim.ttl), f"{since:017.6f}"
        terms = ("1", key, claim.owner, ttl, f"{number}:{claim.identity}")
        answers = nodes.ask("EVAL", TAKE, *terms)
        mine = [node for node, answer in answers.items() if answer == 1]
        is_in_time = clock() - since < claim.ttl * (1 - DRIFT) - DRIFT_SECONDS
        if is_in_time and len(mine) >= nodes.majority:
            return Granted(None, since, number)
        # Before the next request finds other faults.
        failure = nodes.failure(answers)
        if mine or len(answers) < len(nodes.all):
            # A silent node may carry it out yet, and this when the next try has the lock.
            undone = ("1", key, f"{claim.owner}:{number}", ttl)
            nodes.ask("EVAL", GIVE, *undone, needed=len(mine), undoes=True)
        if failure:
            raise failure
        others = [answer for answer in answers.values() if answer != 1]
        return _holder(others, len(answers), nodes.majority)

    def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        decided: list[bool | None] = []
        failure: NoMajority | None = None
        for start in range(0, len(grants), AT_ONCE):
            found, why = self._vote(EXTEND, grants[start : start + AT_ONCE])
            decided, failure = decided + found, why or failure
            if found.count(None) == len(found):
                # A further request might take as long.
                decided += [None] * (len(grants) - len(decided))
                break
        if failure:
            runtime.notify(
                logger.warning,
                "Redlock of alias %r could not renew %d of %d leases: %s",
                *(self.config.alias, decided.count(None), len(grants), failure),
                extra=logs.facts(alias=self.config.alias, reason=str(failure)),
            )
        return [_RENEWALS[each] for each in decided]

    def release(self, grant: Grant) -> bool:
        # As above: the core repeats a claim whose grant it couldn't record, after its release.
        owner = f"{grant.owner}:{grant.handle}" if grant.handle else grant.owner
        return self._decide("release", GIVE, grant._replace(owner=owner))

    def verify(self, grant: Grant) -> bool:
        # No key that is gone comes back by itself. So the nodes that agree had theirs all at one
        # moment, that of the first answer. It isn't extended: max_hold may be over.
        return self._decide("verify", VERIFY, grant)

    def _decide(self, doing: str, script: str, grant: Grant) -> bool:
        with self._asking(doing, grant.name):
            (answer,), failure = self._vote(script, [grant])
            if answer is None:
                raise failure or NoMajority
            return answer

    def _vote(
        self, script: str, grants: Sequence[Grant]
    ) -> tuple[list[bool | None], NoMajority | None]:
        """Return what a majority says of each grant, None if there is none, and then why."""
        nodes = self._nodes.get()
        keys = [self._key(grant.name) for grant in grants]
        terms = [term for each in grants for term in (each.owner, _milliseconds(each.ttl))]
        answers = nodes.ask("EVAL", script, str(len(keys)), *keys, *terms, undoes=script is GIVE)
        decided: list[bool | None] = [None] * len(grants)
        for place, votes in enumerate(zip(*answers.values(), strict=True)):
            if (yes := sum(votes)) >= nodes.majority:
                decided[place] = True
            elif len(votes) - yes > len(nodes.all) - nodes.majority:
                decided[place] = False
        return decided, nodes.undecided(answers) if None in decided else None

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        nodes, found = self._nodes.get(), dict[str, Held]()
        for start in range(0, len(names), AT_ONCE):
            part = names[start : start + AT_ONCE]
            with self._asking("look up locks"):
                answers = nodes.ask("EVAL", LOOK, str(len(part)), *map(self._key, part))
                if failure := nodes.failure(answers):
                    raise failure
            for name, seen in zip(part, zip(*answers.values(), strict=True), strict=True):
                if held := _holder(seen, len(answers), nodes.majority):
                    found[name] = held
        return found

    def _key(self, name: str) -> str:
        return f"{self.config.key_prefix or 'fencedlock'}:redlock:{name}"

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        where, urls = config.where("LOCATION"), config.locations
        for url in urls:
            yield from url_problems(config, url, NODE_FORMS)
            if not fault_of_url(url) and "sentinel" in urlsplit(url).scheme:
                remedy = "List the servers themselves: a failover can lose locks."
                yield Problem("E007", f"{where} has a URL of Sentinels.", remedy)
        count, distinct = len(urls), len(set(map(server_of, urls)))
        if distinct < count or count < 3:
            what = f"{where} lists {distinct} different nodes in {count} URLs."
            remedy = "List 3 or 5 independent Redis servers: a majority of them has to answer."
            yield Problem("E054", what, remedy)
        elif count % 2 == 0:
            remedy = f"List {count - 1}, which may lose as many, or {count + 1}."
            yield Problem("W054", f"{where} lists {count} nodes, an even number.", remedy)

    def check(self) -> Iterator[Problem]:
        nodes = self._nodes.get()
        answers = nodes.ask("PING", needed=len(nodes.all))
        if len(answers) < nodes.majority:
            why = self.unavailable("answer", nodes.undecided(answers))
            yield Problem("E013", str(why), "Start the servers, or correct LOCATION.")
        elif len(answers) < len(nodes.all):
            what = f"{self.config.where('LOCATION')}: {nodes.undecided(answers)}."
            yield Problem("W055", what, "Start the other nodes before more of them fail.")
        servers: dict[object, Node] = {}
        forgetful = []
        for node in answers:
            where = f"Node {node.label} of {self.config.where()}"
            try:
                client = node.client()
                info = client.info()
                # A replica has the second one of its primary.
                for key in filter(None, map(info.get, ("run_id", "master_replid"))):
                    other = servers.setdefault(key, node)
                    if other is not node:
                        what = f"{where} is the same server as node {other.label}, or its replica."
                        remedy = "List independent servers: one that fails must be one node."
                        yield Problem("E054", what, remedy)
                        break
                found = node_problems(where, client)
                yield from (each for each in found if each.id not in ("I001", "I002"))
                fsync = client.config_get("appendfsync").get("appendfsync")
                if not info.get("aof_enabled") or fsync != "always":
                    forgetful.append(node.label)
            except RedisError as exc:
                yield Problem("W055", f"{where} could not be checked: {exc}", "Allow INFO, CONFIG.")
        if forgetful:
            what = f"After a crash these nodes forget locks: {', '.join(forgetful)}. A lock"
            what += " can be granted again while its holder still runs. Tokens still rise."
            remedy = "Set appendonly yes and appendfsync always, or restart a node a ttl later."
            yield Problem("I054", what, remedy)
        elif answers:
            yield ok(f"All nodes of {self.config.where()} that answer keep each lock on disk.")


_RENEWALS = {True: Renewal.KEPT, False: Renewal.LOST, None: Renewal.UNKNOWN}


def _milliseconds(ttl: float) -> str:
    # A node's clock may be faster than the holder's, whose lease ends after its ttl.
    return str(math.ceil((ttl * (1 + DRIFT) + DRIFT_SECONDS) * 1000) + KEPT)


def _holder(seen: Collection[Any], answered: int, majority: int) -> Held | None:
    """
    Return the owner that keeps others from the lock; None if another owner can get it.

    Args:
        seen: Value and milliseconds of each key that was found.
        answered: How many nodes answered.
    """
    found = defaultdict(list)
    for value, left in seen:
        if isinstance(value, bytes) and (left < 0 or left > KEPT):
            found[value].append(left)
    value, lefts = max(found.items(), key=lambda each: len(each[1]), default=(b"", []))
    if answered - len(lefts) >= majority:
        return None
    owner, colon, rest = value.decode(errors="replace").partition(":")
    expires_in = None if min(lefts) < 0 else (max(lefts) - KEPT) / 1000 / (1 + DRIFT)
    # Without a colon, other software has set the key.
    return Held(owner if colon else "", rest.partition(":")[2], expires_in=expires_in)
