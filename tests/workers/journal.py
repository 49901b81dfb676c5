"""What the bodies of tasks did, in a file that all processes append to."""

import contextlib
import itertools
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.servers.process import wait_until

VARIABLE = "FENCEDLOCK_TEST_JOURNAL"
#: The longest that a body waits for its gate: no test that failed leaves one running.
PATIENCE = 60


def now() -> float:
    """Return the seconds since the machine was started: the same clock in every process."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


_OF_SPANS = {"event", "run", "at", "key", "pid"}


@dataclass
class Span:
    """One run of a body. One that was killed has no end."""

    run: str
    key: str
    pid: int
    begun: float
    ended: float | None = None
    outcome: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["facts"][name]
        except KeyError:
            raise AttributeError(name) from None

    def overlaps(self, later: "Span", killed: float | None = None) -> bool:
        end = self.ended or killed
        return end is None or later.begun < end


class Journal:
    def __init__(self, path: Path | None = None) -> None:
        self.path = path or Path(os.environ[VARIABLE])
        self._lines: list[dict[str, Any]] = []
        self._read = 0

    @contextlib.contextmanager
    def body(self, key: str, **facts: Any) -> Iterator[str]:
        run = uuid.uuid4().hex
        who = {"pid": os.getpid(), "thread": threading.get_ident()}
        outcome = "returned"
        try:
            # A process that reads that it has begun may interrupt it before the next line.
            self.write(event="begun", run=run, key=key, **who, **facts)
            yield run
        except BaseException as exc:
            outcome = type(exc).__name__
            raise
        finally:
            self.write(event="ended", run=run, key=key, outcome=outcome)

    def write(self, **line: Any) -> None:
        """Append a line in one write: lines of processes don't mix, and a kill leaves no half."""
        text = json.dumps({"at": now(), **line}, default=str) + "\n"
        descriptor = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def wait_at_gate(self, key: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self._gate(key).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"Nobody opened the gate {key!r}.")
            time.sleep(0.005)

    def open_gate(self, key: str) -> None:
        self._gate(key).touch()

    def lines(self) -> list[dict[str, Any]]:
        if self.path.exists():
            with self.path.open("rb") as file:
                # Tests ask often, and a journal of many tests is long.
                file.seek(self._read)
                # One that is being written may be seen in part.
                whole, end, _ = file.read().rpartition(b"\n")
            self._read += len(whole + end)
            self._lines += map(json.loads, whole.splitlines())
        return self._lines

    def spans(self, key: str) -> list[Span]:
        spans: dict[str, Span] = {}
        for line in self.lines():
            if line["key"] != key or "run" not in line:
                continue
            run, at = line["run"], line["at"]
            if line["event"] == "begun":
                facts = {name: value for name, value in line.items() if name not in _OF_SPANS}
                spans[run] = Span(run, key, line["pid"], at, facts=facts)
            elif run in spans:
                # Else it was interrupted before it could say that it began.
                spans[run].ended, spans[run].outcome = at, line["outcome"]
        return sorted(spans.values(), key=lambda span: span.begun)

    def notes(self, key: str, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["key"] == key and line["event"] == event]

    def wait_for_begun(self, key: str, count: int = 1, timeout: float = 20) -> list[Span]:
        return self._wait(key, count, timeout, "begun")

    def wait_for_ended(self, key: str, count: int = 1, timeout: float = 20) -> list[Span]:
        return self._wait(key, count, timeout, "ended")

    def assert_no_overlap(self, key: str, killed: dict[str, float] | None = None) -> list[Span]:
        """Fail if two bodies of a key ran at once, or tokens didn't rise from run to run."""
        spans = self.spans(key)
        for earlier, later in itertools.pairwise(spans):
            at = (killed or {}).get(earlier.run)
            assert not earlier.overlaps(later, at), f"{earlier} and {later} ran at once"
        tokens = [span.token for span in spans if span.facts.get("token") is not None]
        assert tokens == sorted(set(tokens)), f"the tokens don't rise: {tokens}"
        return spans

    def _wait(self, key: str, count: int, timeout: float, event: str) -> list[Span]:
        def enough() -> bool:
            return len([s for s in self.spans(key) if event == "begun" or s.ended]) >= count

        try:
            wait_until(enough, f"{count} bodies of {key!r} that have {event}", timeout)
        except TimeoutError as exc:
            raise TimeoutError(f"{exc} There are {self.spans(key)}.") from None
        return self.spans(key)

    def _gate(self, key: str) -> Path:
        return self.path.with_name(f"gate-{key}")
