"""The ZooKeeper backend: an entry is an ephemeral sequential node, ordered by its number."""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple
from urllib.parse import quote

from django.core.exceptions import ImproperlyConfigured

try:
    import kazoo  # noqa: F401
except ImportError as exc:
    raise ImproperlyConfigured(
        "The ZooKeeper backend needs kazoo. Run: pip install 'django-fencedlock[zookeeper]'"
    ) from exc

from ..conf import AliasConfig, Problem
from ..core.runtime import clock
from .http_settings import TLS_OPTIONS
from .interface import Claim, Held
from .places import Place, SessionGone, Watch, describe_claim, read_entry, read_queue
from .queued import QueuedBackend
from .zookeeper_nodes import in_the_way, is_reader, owner_of, queue_of, write_node
from .zookeeper_session import PAUSE, Broken, Errors, KazooSession, TimeoutIsShort
from .zookeeper_settings import USER_OPTIONS, read_location, server_problems, settings_problems

#: Nodes that the locks are spread over. With a parent for each lock, all parents would stay.
PARENTS = 64


class Node(NamedTuple):
    """The entry of an owner of this process."""

    session: KazooSession
    path: str
    #: What made it (czxid): it rises with each change of ZooKeeper's tree.
    number: int


class ZooKeeperBackend(QueuedBackend):
    """
    Locks on ZooKeeper 3.5 or newer, by the client of kazoo.

    An uncontended acquire is one round trip, a release is one, and so is the renewal of all locks
    of a process. A process has one connection and three threads for each ttl.
    """

    label = "zookeeper"
    supports_shared = True
    errors = Errors
    option_names = frozenset({"TIMEOUT", *USER_OPTIONS, *TLS_OPTIONS})

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        _, path = read_location(config)
        self._root = f"{path}/{quote(f'{config.key_prefix}fencedlock', safe='')}"
        self._open: set[KazooSession] = set()
        #: By owner id.
        self._nodes: dict[str, Node] = {}

    def forget(self) -> None:
        for each in self._open:
            each.forget()
        self._open, self._nodes = set(), {}

    # Sessions

    def open(self, ttl: float) -> KazooSession:
        session = KazooSession(self.config, ttl)
        self._open = {session, *(each for each in self._open if not each.is_gone)}
        try:
            session.open()
            self._make_parents(session)
        except BaseException as exc:
            self._open.discard(session)
            session.stop()
            if isinstance(exc, SessionGone):
                # It was refused once it was connected.
                raise session.no_answer() from None
            raise
        return session

    def _make_parents(self, session: KazooSession) -> None:
        (found,) = session.ask(partial(session.children, self._root))
        if found is not None and len(found) >= PARENTS:
            return
        parts = self._root.split("/")
        paths = ["/".join(parts[:count]) for count in range(2, len(parts) + 1)]
        stats = session.ask(*(partial(session.kazoo.exists_async, each) for each in paths))
        paths = [path for path, stat in zip(paths, stats, strict=True) if not stat]
        paths += [f"{self._root}/{number:02x}" for number in range(PARENTS)]
        session.ask(*(partial(session.kazoo.create_async, each) for each in paths))

    def keep(self, session: KazooSession) -> bool:
        with contextlib.suppress(SessionGone):
            session.ask(partial(session.check, self._root))
            return True
        return False

    def end(self, session: KazooSession) -> None:
        self._open.discard(session)
        session.stop().join(self.config.timeout)

    def _any_session(self) -> KazooSession:
        for session in list(self._sessions.values()):
            if session.id.is_gone:
                self._drop(session)
        found = next(iter(self._sessions.values()), None) or self._session(self.config.ttl)
        session_of_kazoo: KazooSession = found.id
        return session_of_kazoo

    # Entries are nodes: the lock's name, the kind, the owner's id, and ZooKeeper's number.

    def _parent(self, name: str) -> str:
        return f"{self._root}/{zlib.crc32(name.encode()) % PARENTS:02x}"

    def enter(self, session: KazooSession, claim: Claim, alone: bool) -> Place | Held:
        name, parent = claim.name, self._parent(claim.name)
        path = f"{parent}/{write_node(name, claim.owner, claim.shared)}"
        text = describe_claim(claim).encode()
        flags = {"ephemeral": True, "sequence": True, "include_data": True}
        create = partial(session.kazoo.create_async, path, text, **flags)
        list_all = partial(session.children, parent)
        end = clock() + self.config.timeout
        # The claim was sent before: it may have a node.
        is_repeated = self._nodes.pop(claim.owner, None) is not None
        # A list may be old. An empty one does no harm: the claim's own node is compared with all.
        if alone and not is_repeated:
            is_repeated = bool(in_the_way(queue_of(name, session.ask(list_all)[0]), claim))
        while True:
            if is_repeated:
                queue = self._queues(session, [name])[name]
                if own := [each for each in queue if owner_of(each) == claim.owner]:
                    path = f"{parent}/{own[0]}"
                    if found := session.get(path)[0]:
                        return self._entered(
                            claim, Node(session, path, found[1].czxid), queue, alone
                        )
                elif alone and in_the_way(queue, claim):
                    return self._first(session, name, queue)
            try:
                made, nodes = session.send(create, list_all)
            except Broken:
                # No copy comes later: ZooKeeper refuses what the broken connection carried.
                is_repeated = True
                if clock() >= end:
                    raise
                time.sleep(PAUSE)
                continue
            if made:
                node = Node(session, made[0], made[1].czxid)
                return self._entered(claim, node, queue_of(name, nodes), alone)
            self._make_parents(session)

    def _entered(self, claim: Claim, node: Node, queue: list[str], alone: bool) -> Place | Held:
        self._nodes[claim.owner] = node
        place = self._place(claim.name, node, queue)
        if place is None or (alone and place.ahead):
            self.leave(claim.name, claim.owner)
            return place.first if place else Held()
        return place

    def _place(self, name: str, node: Node, queue: list[str]) -> Place | None:
        parent, _, own = node.path.rpartition("/")
        if own not in queue:
            return None
        before = queue[: queue.index(own)]
        if is_reader(own):
            before = [each for each in before if not is_reader(each)]
        if not before:
            return Place(node.number, None, Held())
        first = self._first(node.session, name, queue)
        return Place(node.number, f"{parent}/{before[-1]}", first)

    def look(self, name: str, owner: str, number: int) -> Place | None:
        node = self._nodes.get(owner)
        if node is None or node.number != number:
            return None
        session = node.session
        list_all = partial(session.children, self._parent(name))
        with contextlib.suppress(SessionGone):
            # In this order: the list is at least as new as what the quorum confirmed.
            checked, nodes = session.ask(partial(session.check, node.path), list_all)
            if not isinstance(checked[0], Exception):
                return self._place(name, node, queue_of(name, nodes))
        return None

    def watch(self, name: str, owner: str, place: Place, watch: Watch) -> None:
        woken = threading.Event()
        watch.on_stop(woken.set)
        if node := self._nodes.get(owner):
            with contextlib.suppress(SessionGone):
                node.session.wait(place.ahead, woken, watch.seconds)

    def leave(self, name: str, owner: str) -> bool | None:
        if node := self._nodes.get(owner):
            # Without its session, the node is gone as well.
            was_there: bool | None = False
            with contextlib.suppress(SessionGone):
                was_there = node.session.delete(node.path)
            self._nodes.pop(owner, None)
            return was_there
        session = self._any_session()
        queue = self._queues(session, [name])[name]
        paths = [f"{self._parent(name)}/{each}" for each in queue if owner_of(each) == owner]
        found = [session.delete(path) for path in paths]
        return any(found) or (None if None in found else False)

    def entries(self, session: KazooSession, names: Mapping[str, str]) -> Mapping[str, str]:
        nodes = {owner: self._nodes[owner] for owner in names if owner in self._nodes}
        paths = {owner: node.path for owner, node in nodes.items() if node.session is session}
        # Each is looked up once. Then its watch reports its end, and a broken connection.
        found = set(filter(session.is_there, paths.values()))
        if unknown := [path for path in paths.values() if path not in found]:
            with contextlib.suppress(SessionGone):
                found |= session.watch(*unknown)
        return {owner: names[owner] for owner, path in paths.items() if path in found}

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        with self._asking("look up locks"):
            session = self._any_session()
            queues = self._queues(session, names)
            return self._describe(session, {name: each for name, each in queues.items() if each})

    def _queues(self, session: KazooSession, names: Sequence[str]) -> dict[str, list[str]]:
        """Return the nodes of locks. What was done before at other servers is seen."""
        parents = list({self._parent(name) for name in names})
        sync = partial(session.kazoo.sync_async, self._root)
        _, *found = session.ask(sync, *(partial(session.children, each) for each in parents))
        nodes = dict(zip(parents, found, strict=True))
        return {name: queue_of(name, nodes[self._parent(name)]) for name in names}

    def _first(self, session: KazooSession, name: str, queue: list[str]) -> Held:
        found = self._describe(session, {name: queue[:1]})
        return found.get(name, Held(owner_of(queue[0]), shared=is_reader(queue[0])))

    def _describe(self, session: KazooSession, queues: Mapping[str, list[str]]) -> dict[str, Held]:
        """Return the holders of each lock, unless their nodes were deleted meanwhile."""
        firsts = {
            name: list(takewhile(is_reader, queue)) or queue[:1] for name, queue in queues.items()
        }
        paths = [f"{self._parent(name)}/{each}" for name, nodes in firsts.items() for each in nodes]
        answers, found = iter(session.get(*paths)), {}
        for name, nodes in firsts.items():
            entries = [
                read_entry(owner_of(node), data[0].decode(), data[1].czxid)
                for node in nodes
                if (data := next(answers))
            ]
            if entries:
                gone = len(nodes) - len(entries)
                found[name] = read_queue(entries, len(queues[name]) - gone)
        return found

    # Problems

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        yield from settings_problems(config)

    def check(self) -> Iterator[Problem]:
        for host, port in read_location(self.config)[0]:
            yield from server_problems(self.config, host, port)
        try:
            self._session(self.config.ttl)
        except TimeoutIsShort as exc:
            yield Problem("E052", f"{self.config.where('TTL')}: {exc}.")
        except self.errors as exc:
            remedy = "Start the servers, or correct the settings of the alias."
            yield Problem("E013", str(self.unavailable("answer", exc)), remedy)
