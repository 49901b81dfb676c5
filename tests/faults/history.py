"""
What happened in a run: each process's own account of it, and the database's.

A process appends one line when it asks for something and one when it has the answer, each in one
write, so that a kill loses nothing that was written and leaves no half of a line but the last.
"""

import itertools
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Outcomes. One that is unknown, or has no answer, may have happened or not.
OK, FAIL, UNKNOWN = "ok", "fail", "unknown"
NEMESIS = "nemesis"


def now() -> int:
    return time.monotonic_ns()


@dataclass
class Operation:
    """Something that a client asked for; `begun` of a write is when its COMMIT was."""

    kind: str
    name: str
    begun: int
    ended: int | None = None
    outcome: str = UNKNOWN
    client: str = ""
    token: int | None = None
    owner: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["facts"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def ok(self) -> bool:
        return self.outcome == OK

    @property
    def shared(self) -> bool:
        """Whether a reader asked for it."""
        return bool(self.facts.get("shared"))

    @property
    def recorded_owner(self) -> str:
        """What the fence has as the owner."""
        return "shared" if self.shared else self.owner


@dataclass(frozen=True)
class Entry:
    place: int
    kind: str
    name: str
    before: int | None
    after: int
    token: int | None
    stamp: str


@dataclass
class History:
    """What clients asked for, the database's trail, the injections, and the counts at the end."""

    operations: list[Operation] = field(default_factory=list)
    trail: list[Entry] = field(default_factory=list)
    injections: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def of(self, kind: str, *outcomes: str) -> list[Operation]:
        found = [each for each in self.operations if each.kind == kind]
        if outcomes:
            found = [each for each in found if each.outcome in outcomes]
        return sorted(found, key=lambda each: each.begun)


class Recorder:
    def __init__(self, directory: Path, client: str) -> None:
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self.client = client
        self._descriptor = os.open(directory / f"{client}.jsonl", flags, 0o644)
        self._numbers = itertools.count()

    def invoke(self, kind: str, name: str, **facts: Any) -> int:
        number = next(self._numbers)
        self.write(number=number, event="invoke", kind=kind, name=name, **facts)
        return number

    def commit(self, number: int) -> None:
        self.write(number=number, event="commit")

    def answer(self, number: int, outcome: str, **facts: Any) -> None:
        self.write(number=number, event=outcome, **facts)

    def write(self, **line: Any) -> None:
        os.write(self._descriptor, (json.dumps({"at": now(), **line}) + "\n").encode())


def new_stamp() -> str:
    return uuid.uuid4().hex


def read_operations(directory: Path) -> list[Operation]:
    return [
        operation
        for path in sorted(directory.glob("*.jsonl"))
        if path.stem != NEMESIS
        for operation in _operations(path.stem, read_lines(path))
    ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def entries(rows: Iterable[Iterable[Any]]) -> list[Entry]:
    return sorted((Entry(*row) for row in rows), key=lambda entry: entry.place)


_OUTCOMES = {OK, FAIL, UNKNOWN}
_OWN = ("kind", "name", "token", "owner")


def _operations(client: str, lines: Iterable[dict[str, Any]]) -> Iterator[Operation]:
    found: dict[int, Operation] = {}
    for line in lines:
        number, event, at = line.pop("number"), line.pop("event"), line.pop("at")
        if event == "invoke":
            own = {key: line.pop(key) for key in _OWN if key in line}
            found[number] = Operation(begun=at, client=client, facts=line, **own)
        elif event == "commit":
            found[number].begun = at
        elif event in _OUTCOMES:
            _complete(found[number], at, event, line)
    yield from found.values()


def _complete(operation: Operation, at: int, outcome: str, line: dict[str, Any]) -> None:
    operation.ended, operation.outcome = at, outcome
    # Which permit was granted is known only then.
    for key in ("token", "owner", "name"):
        if key in line:
            setattr(operation, key, line.pop(key))
    operation.facts |= line
