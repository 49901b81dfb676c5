"""The Consul backend: an entry is a key that a session locks, ordered by its creation."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple
from urllib.parse import quote

from ..conf import AliasConfig, Problem, seconds
from ..problems import ok
from .http import Answer, Hidden, HttpNodes, NodesFailed
from .http_settings import TLS_OPTIONS, credentials, location_problems
from .interface import Claim, Held
from .places import Place, SessionGone, Watch, describe_claim, read_entry, read_queue
from .queued import QueuedBackend

PORT = 8500
FORM = "Write it as 'http://127.0.0.1:8500' (https:// with TLS), or as a list of such URLs."
#: The node of all sessions. Those of an agent's node end when the agent leaves the cluster, and
#: when it was a server that crashed: the others remove it after some seconds.
NODE = "django-fencedlock"
#: Consul's own default and limit of a session's TTL, in seconds.
SESSION_TTL_MIN, LONGEST = 10.0, 86400.0
Operations = Sequence[Mapping[str, str]]
#: Operations that Consul allows in one transaction.
MAX_OPERATIONS = 64
#: Waiters of a process with a connection each: Consul allows 200 connections to a client's address.
WATCHES = 100
#: Seconds after which the other waiters of the process ask again.
PAUSE = 0.4
ACL = "Look at OPTIONS['TOKEN'] and its policies"
#: What a server refuses for good, and the remedy.
REFUSALS = {
    "Session TTL": "Set OPTIONS['SESSION_TTL_MIN'] to the server's session_ttl_min, or more.",
    ACL: f"It has to write the node and session {NODE!r}, and the keys below KEY_PREFIX.",
}
# Without it, the locks "a" and "a/b" would share a folder.
_quoted = lru_cache(4096)(partial(quote, safe=":"))
NO_SESSION, NOT_FREE, NO_KEY = "invalid session", "lock is already held", "doesn't exist"


class ConsulBackend(QueuedBackend):
    """
    Locks on Consul 1.8 or newer.

    An uncontended acquire is one request (two if it doesn't wait), and a release is one. A renewal
    of all locks of a process is one request, and one for every 64 locks.

    Consul ends a session up to two ttls after its last renewal. The lock of a process that died on
    another machine is free then.
    """

    label = "consul"
    supports_shared = True
    errors = (NodesFailed,)
    option_names = frozenset({"TIMEOUT", "TOKEN", "SESSION_TTL_MIN", *TLS_OPTIONS})
    longest = LONGEST

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        self.shortest = _session_ttl_min(config)
        self._nodes = HttpNodes(config, PORT)
        if token := config.options.get("TOKEN"):
            self._nodes.headers["X-Consul-Token"] = Hidden(token)
        self._prefix = f"{config.key_prefix}fencedlock/"
        #: Owners that have a connection to wait on.
        self._watching: set[str] = set()

    def forget(self) -> None:
        self._watching = set()
        self._nodes.after_fork()

    def close(self) -> None:
        super().close()
        self._nodes.close()

    # Sessions

    def open(self, ttl: float) -> str:
        node = {"Node": NODE, "Address": "127.0.0.1"}
        _checked(self._nodes.ask("PUT", "/v1/catalog/register", node), kind=bool)
        # By default Consul ends it by the node's health, and keeps its locks for another 15 s.
        wanted = {"Node": NODE, "NodeChecks": [], "LockDelay": "0s", "Behavior": "delete"}
        # A repeated request opens a second one, which ends unused.
        answer = self._nodes.ask("PUT", "/v1/session/create", {**wanted, "TTL": f"{ttl:g}s"})
        return str(_checked(answer, kind=dict).body["ID"])

    def keep(self, session: str) -> bool:
        answer = self._nodes.ask("PUT", f"/v1/session/renew/{session}")
        return answer.status != 404 and bool(_checked(answer))

    def end(self, session: str) -> None:
        _checked(self._nodes.ask("PUT", f"/v1/session/destroy/{session}"))

    # Entries are keys: a folder for each lock, and in it the owner's id.

    def _key(self, name: str, owner: str = "") -> str:
        return f"{self._prefix}{_quoted(name)}/{owner}"

    def enter(self, session: str, claim: Claim, alone: bool) -> Place | Held:
        # Consul has no test for an empty folder.
        queue = self._list(claim.name) if alone else []
        if _in_the_way(queue, claim.shared) and claim.owner not in (each.owner for each in queue):
            return queue[0].described()
        folder, value = self._key(claim.name), describe_claim(claim).encode()
        lock = {"Verb": "lock", "Key": f"{folder}{claim.owner}", "Session": session}
        lock["Value"] = base64.b64encode(value).decode()
        answer = self._ask([lock, _tree(folder)], allowed=409)
        if answer.status == 200:
            queue = _entries(answer.body["Results"][1:], folder)
            if place := _place(queue, claim.owner):
                return place._replace(is_repeated=answer.is_repeated)
        elif NO_SESSION not in (why := _message(answer)) and NOT_FREE not in why:
            raise _refused(answer)
        # The key is of an earlier session, or it was unlocked by hand and has lost its place.
        self.leave(claim.name, claim.owner)
        raise SessionGone

    def look(self, name: str, owner: str, number: int) -> Place | None:
        place = _place(self._list(name, "?consistent"), owner)
        return place if place and place.number == number else None

    def watch(self, name: str, owner: str, place: Place, watch: Watch) -> None:
        if len(self._watching) >= WATCHES:
            time.sleep(min(watch.seconds, PAUSE))
            return

        ahead = place.ahead
        terms = f"index={ahead.modified}&wait={max(1, int(watch.seconds * 1000))}ms"
        path = f"/v1/kv/{quote(ahead.folder + ahead.owner)}?{terms}"
        self._watching.add(owner)
        try:
            # One line: the key after a change. Nothing: the key is gone.
            for line in self._nodes.stream("GET", path, None, watch.seconds, watch.on_stop):
                if not line.startswith("["):
                    # An error, which would keep this process busy.
                    time.sleep(min(watch.seconds, PAUSE))
                return
        finally:
            self._watching.discard(owner)

    def leave(self, name: str, owner: str) -> bool | None:
        key = self._key(name, owner)
        # A delete alone doesn't say whether there was a key.
        wanted = [{"Verb": "get", "Key": key}, {"Verb": "delete", "Key": key}]
        answer = self._ask(wanted, allowed=409)
        if answer.status == 409 and NO_KEY not in _message(answer):
            raise _refused(answer)
        return answer.status == 200 or (None if answer.is_repeated else False)

    def entries(self, session: str, names: Mapping[str, str]) -> Mapping[str, str]:
        # A tree of one key: a "get" fails the transaction if one of the keys is gone.
        wanted = [_tree(self._key(name, owner)) for owner, name in names.items()]
        found = self._read(wanted, "?consistent")
        return {each.owner: names[each.owner] for each in found if each.session == session}

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        queues: dict[str, list[_Entry]] = {}
        with self._asking("look up locks"):
            for each in self._read([_tree(self._key(name)) for name in names]):
                queues.setdefault(each.folder, []).append(each)
        found = ((name, queues.get(self._key(name), [])) for name in names)
        held = ((name, [each.described() for each in queue]) for name, queue in found if queue)
        return {name: read_queue(entries, len(entries)) for name, entries in held}

    # Requests

    def _list(self, name: str, query: str = "") -> list[_Entry]:
        folder = self._key(name)
        return _entries(self._ask([_tree(folder)], query).body["Results"], folder)

    def _read(self, wanted: Operations, query: str = "") -> list[_Entry]:
        """Return the entries of many trees, in the order of their creation."""
        found: list[_Entry] = []
        for start in range(0, len(wanted), MAX_OPERATIONS):
            answer = self._ask(wanted[start : start + MAX_OPERATIONS], query)
            found += _entries(answer.body["Results"])
        return sorted(found)

    def _ask(self, wanted: Operations, query: str = "", allowed: int = 200) -> Answer:
        """Run operations in one transaction."""
        body = [{"KV": each} for each in wanted]
        return _checked(self._nodes.ask("PUT", f"/v1/txn{query}", body), allowed, dict)

    # Problems

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        found = list(location_problems(config, PORT, FORM))
        yield from found
        if not found and credentials(config.locations):
            what = f"{config.where('LOCATION')} has a user or a password, which Consul doesn't use."
            yield Problem("E008", what, "Give the token of an ACL as OPTIONS['TOKEN'].")
        token = config.options.get("TOKEN", "")
        if not isinstance(token, str) or not (token.isascii() and token.isprintable()):
            what = f"{config.where('OPTIONS')}['TOKEN'] isn't a text of printable ASCII."
            yield Problem("E008", what, "If it is read from a file, strip the end of the line.")
        try:
            if config.ttl < (least := _session_ttl_min(config)):
                free = f"a dead process's lock is free after up to {2 * least:g} s"
                what = f"{config.where('TTL')} is {config.ttl:g}, and Consul's sessions have"
                remedy = f"Set TTL to {least:g} or more, or lower session_ttl_min in Consul, and "
                remedy += "OPTIONS['SESSION_TTL_MIN'] with it."
                yield Problem("W053", f"{what} at least {least:g} s: {free}.", remedy)
        except (TypeError, ValueError) as exc:
            yield Problem("E003", str(exc))

    def check(self) -> Iterator[Problem]:
        where = f"The Consul of {self.config.where()}"
        try:
            leader = _checked(self._nodes.ask("GET", "/v1/status/leader")).body
            about = self._nodes.ask("GET", "/v1/agent/self")
            # A token for locks alone may not ask for the version.
            known = about.body if isinstance(about.body, dict) else {}
            version = known.get("Config", {}).get("Version", "unknown")
            yield ok(f"{where} has version {version} and the leader {leader or 'unknown'}.")
            self._try_all()
            yield ok(f"{where} opens sessions and writes keys below {self._prefix!r}.")
        except NodesFailed as exc:
            what = f"{where} refuses what a lock needs: {exc}."
            if remedies := [remedy for why, remedy in REFUSALS.items() if why in what]:
                yield Problem("E053", what, remedies[0])
            else:
                remedy = "Start the server, or correct the settings of the alias."
                yield Problem("E013", str(self.unavailable("answer", exc)), remedy)

    def _try_all(self) -> None:
        """Open a session, and lock a key in a way that no other client sees."""
        session = self.open(max(self.shortest, min(self.config.ttl // 1, self.longest)))
        lock = {"Verb": "lock", "Key": f"{self._prefix}check", "Session": session}
        try:
            self._ask([lock, {"Verb": "delete", "Key": lock["Key"]}])
        finally:
            self.end(session)


class _Entry(NamedTuple):
    """A key that a session has locked."""

    #: Consul's index of its creation: it rises from write to write.
    number: int
    #: The index of its last change.
    modified: int
    folder: str
    owner: str
    session: str
    value: str | None

    def described(self) -> Held:
        text = base64.b64decode(self.value or "").decode(errors="replace")
        return read_entry(self.owner, text, self.number)


def _session_ttl_min(config: AliasConfig) -> float:
    value = config.options.get("SESSION_TTL_MIN", SESSION_TTL_MIN)
    return seconds(value, f"{config.where('OPTIONS')}['SESSION_TTL_MIN']")


def _tree(start: str) -> dict[str, str]:
    """Return the operation that reads all keys with this start."""
    return {"Verb": "get-tree", "Key": start}


def _entries(results: Iterable[Mapping[str, Any]] | None, folder: str = "") -> list[_Entry]:
    """Return the entries among keys, in the order of their creation; those of one folder."""
    found = []
    for key in (each["KV"] for each in results or ()):
        start, slash, owner = key["Key"].rpartition("/")
        # KEY_PREFIX of another alias may name a folder inside of this one. A key that was unlocked
        # by hand may be locked again, when another owner has the lock.
        if folder in ("", start + slash) and key.get("Session") and key["LockIndex"] == 1:
            numbers = key["CreateIndex"], key["ModifyIndex"]
            found.append(_Entry(*numbers, start + slash, owner, key["Session"], key["Value"]))
    return sorted(found)


def _place(queue: Sequence[_Entry], owner: str) -> Place | None:
    for count, each in enumerate(queue):
        if each.owner == owner:
            before = _in_the_way(queue[:count], each.described().shared)
            return Place(each.number, before[-1] if before else None, queue[0].described())
    return None


def _in_the_way(queue: Sequence[_Entry], shared: bool) -> list[_Entry]:
    """Return the entries that exclude a reader, if `shared`, or a writer."""
    return [each for each in queue if not (shared and each.described().shared)]


def _message(answer: Answer) -> str:
    errors = answer.body.get("Errors") if isinstance(answer.body, dict) else None
    return "; ".join(each["What"] for each in errors) if errors else str(answer.body)


def _checked(answer: Answer, allowed: int = 200, kind: type = object) -> Answer:
    if answer.status not in (200, allowed):
        raise _refused(answer)
    if not isinstance(answer.body, kind):
        # A web server, or a proxy's page.
        raise NodesFailed(f"it doesn't answer as Consul does: {str(answer.body)[:60]!r}")
    return answer


def _refused(answer: Answer) -> NodesFailed:
    why = f"{_message(answer)} (status {answer.status})"
    return NodesFailed(f"{why}. {ACL}" if "denied" in why or answer.status == 403 else why)
