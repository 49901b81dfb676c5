"""
One process that contends, for ``benchmarks.team``: it is told on stdin what to do.

Each line is a turn, as JSON; the answer is a line that says that its threads are about to ask, and
a line with what they saw: when each had asked, got and left the lock, on the machine's clock.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from benchmarks import project
from benchmarks.contestants import contestants
from benchmarks.peers import Take

Seen = list[tuple[float, float, float]]


def main() -> None:
    given = json.loads(os.environ["FENCEDLOCK_BENCHMARK"])
    project.configure(given)
    takes = contestants(given)
    print("ready", flush=True)
    for line in sys.stdin:
        turn = json.loads(line)
        threads = [
            _Contender(takes[turn["who"]], turn, first=not place)
            for place in range(turn["threads"])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed = [repr(thread.error) for thread in threads if thread.error]
        seen = [each for thread in threads for each in thread.seen]
        print(json.dumps({"seen": seen, "failed": failed}), flush=True)
    project.give_back_all()


class _Contender(threading.Thread):
    def __init__(self, take: Take, turn: dict[str, float], first: bool) -> None:
        super().__init__(daemon=True)
        self.take = take
        self.turn = turn
        self.first = first
        self.seen: Seen = []
        self.error: Exception | None = None

    def run(self) -> None:
        from django.db import connections

        if self.first:
            print("asking", flush=True)
        try:
            self.contend()
        except Exception as exc:
            self.error = exc
        finally:
            connections.close_all()

    def contend(self) -> None:
        hold, think, until = (self.turn[key] for key in ("hold", "think", "until"))
        while True:
            asked = time.perf_counter()
            with self.take(self.turn["name"]):
                got = time.perf_counter()
                time.sleep(hold)
                left = time.perf_counter()
            self.seen.append((asked, got, left))
            if time.perf_counter() >= until:
                return
            time.sleep(think)


if __name__ == "__main__":
    main()
