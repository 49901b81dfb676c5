"""The names of ZooKeeper's nodes: a lock, the kind of its entry, an owner, and a number."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cmp_to_key
from urllib.parse import quote, unquote

from .interface import Claim

#: What is between name and owner in the node of a reader; in a writer's, it is "!".
READER = "!!"


def write_node(name: str, owner: str, shared: bool = False) -> str:
    # ZooKeeper's number may be negative: "-" as the separator would be taken for its sign.
    return f"{quote(name, safe='')}{READER if shared else '!'}{quote(owner, safe='')}_"


def owner_of(node: str) -> str:
    return unquote(node.rpartition("_")[0].rpartition("!")[2])


def is_reader(node: str) -> bool:
    return READER in node


def in_the_way(queue: Iterable[str], claim: Claim) -> list[str]:
    """Return the nodes that refuse a claim which doesn't wait, and its own."""
    return [
        node
        for node in queue
        if not (claim.shared and is_reader(node)) or owner_of(node) == claim.owner
    ]


def queue_of(name: str, nodes: Iterable[str] | None) -> list[str]:
    """Return the nodes of a lock in the order of their creation."""
    mark = f"{quote(name, safe='')}!"
    return sorted((node for node in nodes or () if node.startswith(mark)), key=cmp_to_key(_compare))


def _compare(one: str, other: str) -> int:
    """Compare the numbers of two nodes. They have 32 bits, and wrap."""
    ahead = (int(one.rpartition("_")[2]) - int(other.rpartition("_")[2])) & 0xFFFFFFFF
    return ahead - (1 << 32) if ahead >> 31 else ahead
