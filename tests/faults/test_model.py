"""
The protocols of all lock services, with every order of their steps.

Spin goes through all states of the models in `model/`: pauses anywhere, leases that run out at any
moment, requests that come late or twice, answers that are lost, crashes, holders forced out, and a
Redis that forgets. Ours keep every promise; each weak variant breaks the ones that it is said to
break, and the shortest way there is told step by step.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import _optional
from tests.servers import ServerMissing

MODELS = Path(__file__).parent / "model"
#: Seconds for one search; it takes some seconds on a machine that has nothing else to do.
LONGEST = 110

PROMISES = {
    "UNIQUE": "a token was handed out twice",
    "RISING": "a token isn't above those that were known before",
    "ORDER": "tokens aren't in the order of the grants",
    "EXCLUSION": "the lock was given to another while it ran",
    "STALE": "a write committed after a newer grant",
    "LOST_UPDATE": "a write went over one that wasn't read",
    "DENIED": "the holder is refused though nobody came after",
    "FORCED": "one who was forced out has written",
    "RETAKEN": "one who was forced out had his lease renewed",
    "OVERTAKEN": "a lease was renewed after another holder had come",
}

#: Two or three clients, so many grants, and what may go wrong meanwhile.
OURS = [
    ("database", "OWNERS=3 CLIENTS=2 LATE=1 CRASHES=0 FORCES=0"),
    ("database", "OWNERS=2 CLIENTS=2 LATE=1 CRASHES=1 FORCES=1"),
    ("redis", "OWNERS=3 CLIENTS=2 LATE=0 CRASHES=0 LOSSES=1"),
    ("redis", "OWNERS=3 CLIENTS=2 LATE=1 CRASHES=0 LOSSES=0"),
    ("redis", "OWNERS=2 CLIENTS=2 LATE=1 CRASHES=1 LOSSES=1"),
    ("redis", "OWNERS=2 CLIENTS=2 LATE=1 CRASHES=0 LOSSES=0 FORCES=1"),
    ("redis", "OWNERS=2 CLIENTS=2 LATE=1 CRASHES=0 LOSSES=0 UNFENCED=1"),
    ("postgres", "LATE=1 CRASHES=1 FORCES=0 LOSSES=1"),
    ("postgres", "LATE=0 CRASHES=0 FORCES=1 LOSSES=1"),
]

QUIET = "OWNERS=2 LATE=0 CRASHES=0 FORCES=0"
THREE = QUIET.replace("2", "3", 1)
FORCED = QUIET.replace("FORCES=0", "FORCES=1")
#: (model, what is weak about it, what may go wrong) and the promises that it breaks; no others.
WEAK = [
    ("database", "NO_FENCE", QUIET, "STALE LOST_UPDATE"),
    ("database", "HIGH_WATER", QUIET, "STALE LOST_UPDATE"),
    ("database", "NO_SHARE", QUIET, "STALE"),
    ("database", "ANY_OWNER", THREE, "EXCLUSION"),
    ("database", "DRAWS_TWICE", "OWNERS=2 LATE=1 CRASHES=0 FORCES=0", "DENIED"),
    ("database", "FREE_WITHOUT_LIFT", FORCED, "FORCED"),
    ("database", "FREE_BEFORE", FORCED, "FORCED"),
    ("database", "NOT_FREED", FORCED, "RETAKEN"),
    ("redis", "NO_FENCE", f"{QUIET} LOSSES=0", "STALE LOST_UPDATE"),
    ("redis", "HIGH_WATER", f"{QUIET} LOSSES=0", "STALE LOST_UPDATE"),
    ("redis", "NO_SHARE", f"{QUIET} LOSSES=0", "STALE"),
    ("redis", "DRAWN_BEFORE", f"{QUIET} LOSSES=0", "ORDER STALE LOST_UPDATE DENIED"),
    ("redis", "DRAWN_AFTER", f"{QUIET} LOSSES=0", "ORDER STALE LOST_UPDATE"),
    ("redis", "NOT_RECORDED", f"{QUIET} LOSSES=1", "UNIQUE RISING STALE LOST_UPDATE"),
    ("redis", "RECORDS_EQUAL", f"{QUIET} LOSSES=1", "UNIQUE RISING"),
    ("redis", "ANY_OWNER", f"{THREE} LOSSES=0", "EXCLUSION"),
    ("redis", "FREE_WITHOUT_LIFT", f"{FORCED} LOSSES=0", "FORCED"),
    ("redis", "FREE_BEFORE", f"{FORCED} LOSSES=0", "FORCED"),
    ("redis", "NOT_FREED", f"{FORCED} LOSSES=0", "RETAKEN"),
    ("redis", "COUNTER_AS_IT_WAS", f"{FORCED} LOSSES=0", "RETAKEN"),
    ("redis", "RECORDS_BLINDLY", "OWNERS=2 LATE=1 CRASHES=0 FORCES=0 LOSSES=1", "STALE"),
    ("redis", "VERIFIES_FIRST", f"{THREE.replace('FORCES=0', 'FORCES=1')} LOSSES=0", "ORDER"),
    ("redis", "COUNTS_FENCED", f"{QUIET} LOSSES=0 UNFENCED=1", "OVERTAKEN"),
    ("postgres", "NO_FENCE", f"{QUIET} LOSSES=1", "STALE LOST_UPDATE"),
    ("postgres", "HIGH_WATER", f"{QUIET} LOSSES=1", "STALE LOST_UPDATE"),
    ("postgres", "NO_SHARE", f"{QUIET} LOSSES=1", "STALE"),
    ("postgres", "FREE_WITHOUT_LIFT", f"{FORCED} LOSSES=0", "FORCED"),
    ("postgres", "FREE_BEFORE", f"{FORCED} LOSSES=0", "FORCED"),
    ("postgres", "NO_TABLE", f"{QUIET} LOSSES=1", "EXCLUSION"),
]


@dataclass
class Found:
    states: int
    #: What happened, step by step, until a promise was broken; empty if none was.
    steps: list[str]


@pytest.fixture(scope="module")
def spin():
    for program in ("spin", "gcc"):
        _optional(lambda program=program: _find(program))


def _find(program):
    if shutil.which(program) is None:
        raise ServerMissing(program, f"apt-get install {program}")


@pytest.fixture
def search(spin, tmp_path):
    """Return a function that searches a model; for the shortest way to break a promise."""

    def search(model, words, promise=None):
        defines = [f"-D{word}" for word in words.split()]
        if promise is not None:
            defines.append(f"-DPROPERTY={list(PROMISES).index(promise) + 1}")
        text = MODELS / f"{model}.pml"
        run("spin", *defines, "-a", text)
        # Breadth first finds the shortest way, and so soon that to optimise would take longer.
        kind = ["-O1"] if promise is None else ["-O0", "-DBFS"]
        options = ["-w", "-DSAFETY", "-DNOBOUNDCHECK", "-DCOLLAPSE", "-DMEMLIM=2000", *kind]
        run("gcc", *options, "-o", "pan", "pan.c")
        told = run("./pan", "-m100000")
        assert "search depth too small" not in told
        assert "out of memory" not in told
        states = int(re.search(r"(\d+) states, stored", told)[1])
        trail = tmp_path / f"{model}.pml.trail"
        if not trail.exists():
            assert "errors: 0" in told, told
            return Found(states, [])
        replayed = run("spin", *defines, "-t", "-k", trail, text)
        trail.unlink()
        return Found(states, _steps(replayed))

    def run(*command):
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=LONGEST, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return search


def _steps(replayed):
    """The steps of a replay: what the models print, less what Spin adds."""
    lines = (line.strip() for line in replayed.splitlines())
    told = re.compile(r"^(owner|late:|the |an unfenced|process|Redis|evicts|BROKEN)")
    steps = [line for line in lines if told.match(line) and "=" not in line]
    # A step that is taken as a whole says its own words after those.
    end = next((place for place, line in enumerate(steps) if line.startswith("BROKEN")), -2)
    return steps[: end + 1] or steps


@pytest.mark.parametrize(("model", "words"), OURS)
def test_ours_keeps_every_promise(search, model, words):
    found = search(model, words)
    assert found.steps == []
    assert found.states > 10_000, "so few states are no search"


@pytest.mark.parametrize(("model", "weakness", "words", "broken"), WEAK)
def test_a_weak_variant_breaks_what_it_is_said_to(search, model, weakness, words, broken):
    for promise in broken.split():
        found = search(model, f"{weakness} {words}", promise)
        assert found.steps, f"{weakness} keeps {promise}"
        assert found.steps[-1] == f"BROKEN: {PROMISES[promise]}"
        # The way there can be read: somebody did something, and not all at once.
        assert any(step.startswith(("owner", "late")) for step in found.steps[:-1])
