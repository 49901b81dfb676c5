"""What the JSON gateway of etcd is asked and answers."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from .http import Answer, NodesFailed
from .interface import Held
from .places import read_entry

#: What the key of a reader has before the owner's id.
READERS = "\0"
#: What to do about a refused request, by a part of its message.
REMEDIES = {
    "user name is empty": "LOCATION needs a user: 'https://user:password@host:2379'",
    "invalid user ID or password": "Correct the user and password in LOCATION",
    "permission denied": "Grant the user's role readwrite for the keys of KEY_PREFIX",
}


def encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def decode(text: str) -> str:
    return base64.b64decode(text).decode()


def ranged(wanted: Mapping[str, Any]) -> dict[str, Any]:
    return {"request_range": wanted}


def entries_of(response: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the keys of one response of a transaction."""
    return list(response.get("response_range", {}).get("kvs", []))


def read_first(first: Sequence[Mapping[str, str]]) -> Held:
    if not first:
        return Held()
    owner = decode(first[0]["key"]).rpartition("\0")[2]
    return read_entry(owner, decode(first[0].get("value", "")), int(first[0]["create_revision"]))


def message_of(answer: Answer) -> str:
    body = answer.body
    return str(body.get("message") or body.get("error") if isinstance(body, dict) else body)


def refused(answer: Answer) -> NodesFailed:
    if answer.status == 404:
        return NodesFailed("it has no JSON gateway: etcd 3.4 or newer, and enable-grpc-gateway")
    what = f"{message_of(answer)} (status {answer.status})"
    return NodesFailed(". ".join([what, *(REMEDIES[each] for each in REMEDIES if each in what)]))
