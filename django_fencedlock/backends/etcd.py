"""The etcd backend: an entry is a key that a lease of etcd keeps, ordered by its creation."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..conf import AliasConfig, Problem
from ..problems import ok
from .etcd_json import READERS, decode, encode, entries_of, message_of, ranged, read_first, refused
from .http import Answer, HttpNodes, NodesFailed
from .http_settings import TLS_OPTIONS, credentials, location_problems
from .interface import Claim, Held
from .places import Place, SessionGone, Watch, describe_claim, read_queue
from .queued import QueuedBackend

PORT = 2379
FORM = (
    "Write it as 'https://user:password@host:2379' (http:// without TLS), or as a list of such "
    "URLs, one for each node."
)
#: Locks that one transaction looks up; etcd allows 128 operations.
LOOKED_UP = 100
#: The part of etcd's default limit of 2 GiB that may be used.
LARGE = 0.8 * 2 * 1024**3
#: What ends an alarm because of it.
NO_SPACE = "Compact and defragment etcd, then disarm the alarm"
#: Revisions after which etcd's history should have been compacted once.
MANY = 100_000


class EtcdBackend(QueuedBackend):
    """
    Locks on etcd 3.4 or newer, by its JSON gateway.

    An uncontended acquire is one request, a release is one, and the renewal of all locks of a
    process is two.
    """

    label = "etcd"
    supports_shared = True
    errors = (NodesFailed,)
    option_names = frozenset({"TIMEOUT", *TLS_OPTIONS})
    shortest, longest = 2.0, 9e9

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        self._nodes = HttpNodes(config, PORT)
        self._user = credentials(config.locations)
        self._prefix = f"{config.key_prefix}fencedlock/"

    def forget(self) -> None:
        self._nodes.after_fork()

    def close(self) -> None:
        super().close()
        self._nodes.close()

    # Sessions are leases of etcd.

    def open(self, ttl: float) -> int:
        # The id is made here: a repeated request opens no second lease.
        lease = secrets.randbits(62) + 1
        self._ask("lease/grant", {"ID": lease, "TTL": int(ttl)}, "lease already exists")
        return lease

    def keep(self, session: int) -> bool:
        return int(self._ask("lease/keepalive", {"ID": session})["result"].get("TTL", 0)) > 0

    def end(self, session: int) -> None:
        self._ask("lease/revoke", {"ID": session}, "lease not found")

    # Entries are keys: the lock's name, and the owner's id. Those of readers come before those of
    # writers, so that the keys of all writers are a range.

    def _key(self, name: str, owner: str = "", shared: bool = False) -> str:
        return f"{self._prefix}{name}\0{READERS * shared}{owner}"

    def _range_of(self, name: str, writers: bool) -> dict[str, str]:
        start = self._key(name)
        return {
            "key": encode(f"{start}\1" if writers else start),
            "range_end": encode(f"{start[:-1]}\1"),
        }

    def _queue_of(self, name: str, order: str, writers: bool = False, **more: Any) -> Any:
        """Return a request for a lock's entries, in the order of their creation."""
        wanted = self._range_of(name, writers)
        return ranged({**wanted, "sort_target": "CREATE", "sort_order": order, **more})

    def enter(self, session: int, claim: Claim, alone: bool) -> Place | Held:
        name, shared = claim.name, claim.shared
        own = encode(self._key(name, claim.owner, shared))
        absent = [{"key": own}, self._range_of(name, shared)][: 1 + alone]
        put = {"key": own, "value": encode(describe_claim(claim)), "lease": session}
        ahead = self._queue_of(name, "DESCEND", shared, limit=1, keys_only=True)
        first = self._queue_of(name, "ASCEND", limit=1)
        request = {
            "compare": [{**each, "target": "CREATE", "create_revision": "0"} for each in absent],
            "success": [ahead, {"request_put": put}],
            "failure": [ranged({"key": own, "keys_only": True}), first],
        }
        answer = self._send("kv/txn", request)
        if answer.status != 200:
            if "requested lease not found" in message_of(answer):
                raise SessionGone
            raise refused(answer)
        found = [entries_of(each) for each in answer.body["responses"]]
        if not answer.body.get("succeeded"):
            entries, firsts = found
            # Its own entry: the request was sent before.
            number, is_repeated = int(entries[0]["create_revision"]) if entries else 0, True
            held = read_first(firsts)
        else:
            number, is_repeated = int(answer.body["header"]["revision"]), answer.is_repeated
            held = Held()
            if not found[0]:
                return Place(number, None, held, is_repeated)
        place = self.look(claim.name, claim.owner, number) if number else None
        return place._replace(is_repeated=is_repeated) if place else held

    def look(self, name: str, owner: str, number: int) -> Place | None:
        shared = owner in self._doubts.readers
        own = encode(self._key(name, owner, shared))
        before = self._queue_of(
            name, "DESCEND", shared, limit=1, keys_only=True, max_create_revision=number - 1
        )
        answer = self._ask(
            "kv/txn",
            {
                "compare": [{"key": own, "target": "CREATE", "create_revision": number}],
                "success": [before, self._queue_of(name, "ASCEND", limit=1)],
            },
        )
        if not answer.get("succeeded"):
            return None
        ahead, first = map(entries_of, answer["responses"])
        return Place(number, ahead[0]["key"] if ahead else None, read_first(first))

    def watch(self, name: str, owner: str, place: Place, watch: Watch) -> None:
        # Without start_revision: etcd serves a watch from a past revision every 100 ms only.
        wanted = {"create_request": {"key": place.ahead, "filters": ["NOPUT"]}}

        for line in self._nodes.stream("POST", "/v3/watch", wanted, watch.seconds, watch.on_stop):
            if not line.endswith("\n"):
                # Half a line of a connection that was cut.
                return
            result = json.loads(line).get("result", {})
            if result.get("created"):
                # It may have gone before the watch began.
                found = self.look(name, owner, place.number)
                if found is None or found.ahead != place.ahead:
                    return
            elif result.get("events") or result.get("canceled"):
                return

    def leave(self, name: str, owner: str) -> bool | None:
        keys = [encode(self._key(name, owner, shared)) for shared in (False, True)]
        if owner in self._doubts.owners:
            key = keys[owner in self._doubts.readers]
            answer = self._send("kv/deleterange", {"key": key})
        else:
            # The kind isn't known: it is another process's owner, or a former one.
            both = [{"request_delete_range": {"key": key}} for key in keys]
            answer = self._send("kv/txn", {"success": both})
        if answer.status != 200:
            raise refused(answer)
        parts = [each["response_delete_range"] for each in answer.body.get("responses", ())]
        was_there = any(int(each.get("deleted", 0)) for each in [answer.body, *parts])
        return was_there or (None if answer.is_repeated else False)

    def entries(self, session: int, names: Mapping[str, str]) -> Mapping[str, str]:
        answer = self._ask("lease/timetolive", {"ID": session, "keys": True})
        keys = (decode(key)[len(self._prefix) :] for key in answer.get("keys", []))
        parts = (key.partition("\0") for key in keys)
        return {owner.removeprefix(READERS): name for name, _, owner in parts}

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        found: dict[str, Held] = {}
        with self._asking("look up locks"):
            for start in range(0, len(names), LOOKED_UP):
                firsts = self._holders(names[start : start + LOOKED_UP], limit=1)
                found |= {name: held for name, held in firsts.items() if not held.shared}
                # Of a lock with readers, all entries: they tell who else reads.
                if read := [name for name in firsts if name not in found]:
                    found |= self._holders(read)
        return found

    def _holders(self, names: Sequence[str], **more: Any) -> dict[str, Held]:
        answer = self._ask(
            "kv/txn", {"success": [self._queue_of(name, "ASCEND", **more) for name in names]}
        )
        found = {}
        for name, each in zip(names, answer["responses"], strict=True):
            if entries := entries_of(each):
                count = int(each["response_range"].get("count", 1))
                found[name] = read_queue([read_first([entry]) for entry in entries], count)
        return found

    # Requests

    def _ask(self, what: str, body: object, allowed: str = "") -> Any:
        """Return the answer's body; raise for an error other than `allowed`."""
        answer = self._send(what, body)
        if answer.status == 200 or (allowed and allowed in message_of(answer)):
            return answer.body
        raise refused(answer)

    def _send(self, what: str, body: object) -> Answer:
        try:
            answer = self._nodes.ask("POST", f"/v3/{what}", body)
            if self._user and self._wants_token(answer):
                name, password = self._user
                login = {"name": name, "password": password}
                given = self._nodes.ask("POST", "/v3/auth/authenticate", login)
                if given.status != 200:
                    raise refused(given)
                self._nodes.headers["Authorization"] = given.body["token"]
                before = answer.is_repeated
                answer = self._nodes.ask("POST", f"/v3/{what}", body)
                answer = answer._replace(is_repeated=answer.is_repeated or before)
        except NodesFailed as exc:
            if "space exceeded" in str(exc):
                raise NodesFailed(f"{exc}. {NO_SPACE}") from exc
            raise
        # Each has a header; that to a keepalive is in its result.
        known = {"header", "result"} & set(answer.body if isinstance(answer.body, dict) else ())
        if answer.status == 200 and not known:
            raise NodesFailed(f"it doesn't answer as etcd does: {str(answer.body)[:60]!r}")
        return answer

    def _wants_token(self, answer: Answer) -> bool:
        found = ["invalid auth token", "user name is empty", "auth store is old"]
        if "Authorization" not in self._nodes.headers:
            # What it says to a client certificate without a name.
            found.append("permission denied")
        return answer.status != 200 and any(text in message_of(answer) for text in found)

    # Problems

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        yield from location_problems(config, PORT, FORM)

    def check(self) -> Iterator[Problem]:
        try:
            yield from self._server_problems()
        except NodesFailed as exc:
            remedy = "Start the server, or correct the settings of the alias."
            yield Problem("E013", str(self.unavailable("answer", exc)), remedy)

    def _server_problems(self) -> Iterator[Problem]:
        where = f"The etcd of {self.config.where()}"
        status = self._ask("maintenance/status", {})
        yield ok(f"{where} is etcd {status.get('version', 'of an unknown version')}.")
        # Without a leader, the request below fails.
        if errors := [each for each in status.get("errors", ()) if "no leader" not in each]:
            what = f"{where} reports {', '.join(errors)}."
            remedy = NO_SPACE if "NOSPACE" in what else "Look at its log, and etcdctl alarm list"
            yield Problem("W050", what, f"{remedy}.")
        if (size := int(status.get("dbSize", 0))) > LARGE:
            what = f"{where} has {size / 2**20:.0f} MiB; at 2048 by default, it refuses all writes."
            yield Problem("W050", what, "Compact and defragment it, or raise quota-backend-bytes.")
        # It says as well whether the user has the permission.
        answer = self._send("kv/range", {"key": encode(self._prefix), "revision": 1})
        is_compacted = "compacted" in message_of(answer)
        if answer.status != 200 and not is_compacted:
            raise refused(answer)
        if (newest := int(status["header"]["revision"])) > MANY and not is_compacted:
            what = (
                f"{where} was never compacted in {newest:,} revisions: each lock leaves 231 bytes."
            )
            yield Problem("W051", what, "Start it with --auto-compaction-retention=1h.")
