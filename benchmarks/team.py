"""Processes that contend for a lock, all at once."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.project import Given

#: Seconds that a turn may take beyond its own time.
PATIENCE = 90


class Stay(NamedTuple):
    """When a lock was asked for, got, and left: seconds on the machine's clock."""

    asked: float
    got: float
    left: float


class Gone(Exception):
    """A process of the team ended, failed, or didn't answer."""


class Team:
    """Processes of ``benchmarks.contender``."""

    def __init__(self, members: list[Member]) -> None:
        self._members = members

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    def ask(
        self,
        who: str,
        name: str,
        waiters: int,
        *,
        hold: float,
        think: float = 0,
        until: float = 0,
    ) -> None:
        """
        Have so many contend, spread over the processes; returns when all are about to ask.

        Args:
            until: When they stop to ask again; by default they ask once.
        """
        turn = {"who": who, "name": name, "hold": hold, "think": think, "until": until}
        size = len(self._members)
        self._asked = [
            (member, waiters // size + (place < waiters % size))
            for place, member in enumerate(self._members)
            if waiters // size + (place < waiters % size)
        ]
        for member, threads in self._asked:
            member.send({**turn, "threads": threads})
        for member, _ in self._asked:
            assert member.line() == "asking"

    def seen(self) -> list[list[Stay]]:
        """What each process saw."""
        found = []
        for member, _ in self._asked:
            answer = json.loads(member.line())
            if answer["failed"]:
                raise Gone(", ".join(answer["failed"]))
            found.append([Stay(*each) for each in answer["seen"]])
        return found


class Member:
    """One process, and what it says."""

    def __init__(self, given: Given) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contender"],
            env={**os.environ, "FENCEDLOCK_BENCHMARK": json.dumps(given)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._rest = b""

    def send(self, turn: dict[str, Any]) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(turn).encode() + b"\n")

    def line(self) -> str:
        """The next line that it says."""
        stdout = self._process.stdout
        assert stdout
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(PATIENCE):
                    raise Gone(f"A process of the team said nothing for {PATIENCE} s.")
                more = os.read(stdout.fileno(), 1 << 20)
                if not more:
                    raise Gone("A process of the team ended.")
                self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid


@contextmanager
def team(given: Given, size: int = 8) -> Iterator[Team]:
    members = [Member(given) for _ in range(size)]
    try:
        for member in members:
            assert member.line() == "ready"
        yield Team(members)
    finally:
        for member in members:
            member.end()
