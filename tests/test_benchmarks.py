"""
A short run of each benchmark. What it counts is asserted; what it times never is.

Each part has a class, so that they run in different processes. Counts are the same on every
machine. Where a waiter's sign of life or the registry's tidying falls into the time that is
counted, there is a little more, which the bounds leave room for.
"""

import json
from pathlib import Path

import pytest

from benchmarks import contestants, page
from benchmarks.__main__ import PARTS
from benchmarks.report import OURS, Figure
from tests.scripts import run_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class _Found(dict[str, list[Figure]]):
    """By part: what a short run of it found. Each part is run when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, part: str) -> list[Figure]:
        path = self._folder / f"{part}.json"
        run_python("-m", "benchmarks", "--short", "--json", path, part)
        self[part] = [Figure(**each) for each in json.loads(path.read_text())["parts"][part]]
        return self[part]


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    return _Found(tmp_path_factory.mktemp("benchmarks"))


@pytest.fixture
def count(figures):
    def look(part, work, who, measure, at=None):
        wanted = (work, who, measure, at)
        found = [
            each.value
            for each in figures[part]
            if (each.work, each.who, each.measure, each.at) == wanted
        ]
        assert len(found) == 1, f"{wanted} was told {len(found)} times."
        return found[0]

    return look


# What these count is asserted where the statements are, in the tests of backends, saves, tasks, the
# admin and the layers.
@pytest.mark.parametrize("part", ["saves", "tasks", "listing", "imports"])
def test_the_other_parts_run(figures, part):
    assert figures[part]


class TestLocks:
    @pytest.mark.parametrize(
        ("work", "commands", "statements"),
        [
            ("redis, unfenced", 2, 0),
            ("redis, fenced", 2, 1),
            ("postgres", 0, 2),
            ("row lease, Postgres", 0, 2),
        ],
    )
    def test_a_lock_asks_as_often_as_the_bare_commands(self, count, work, commands, statements):
        assert count("locks", work, OURS, "commands") == pytest.approx(commands, abs=0.2)
        assert count("locks", work, OURS, "statements") == pytest.approx(statements, abs=0.2)

    def test_an_unfenced_lock_runs_seven_commands_in_its_scripts(self, count):
        assert count("locks", "redis, unfenced", OURS, "commands in scripts") <= 7


class TestContention:
    @pytest.mark.parametrize(
        "who", [contestants.REDIS, contestants.REDIS_UNFENCED, contestants.POSTGRES]
    )
    def test_contention_costs_few_commands_more(self, count, who):
        alone = count("contention", "8 processes contending", who, "commands alone")
        assert alone <= (3.3 if who == contestants.REDIS else 2.3)
        more = count("contention", "8 processes contending", who, "commands more")
        assert more <= (1.5 if who == contestants.POSTGRES else 3.2)


class TestHandoff:
    def test_a_handoff_takes_few_commands(self, count):
        work = "8 waiters, each once"
        # On a busy machine a process may be at its first baton, which it lays.
        assert 2 <= count("handoff", work, contestants.BATON, "commands") < 3
        # Whoever hands it on to one who has waited for long takes a look at him: one more at most.
        assert count("handoff", work, contestants.REDIS_UNFENCED, "commands") <= 5 + 1
        assert count("handoff", work, contestants.POSTGRES, "commands") <= 5


class TestLeases:
    @pytest.mark.parametrize("on", ["redis, unfenced", "redis", "postgres", "database"])
    def test_leases_are_kept_by_few_threads(self, count, on):
        assert count("leases", "100 leases, ttl 3 s", f"{OURS}, {on}", "threads") <= 4


class TestHammering:
    @pytest.mark.parametrize("on", ["database", "database, SQLite", "redis"])
    def test_tries_that_do_not_wait_delay_no_renewal(self, count, on):
        work = "a held lock, tried without waiting"
        assert count("hammering", work, f"{OURS}, {on}", "renewals") > 0
        assert count("hammering", work, f"{OURS}, {on}", "late renewals") == 0


class TestNames:
    def test_a_name_takes_little_room(self, count):
        redis = "a name on Redis"
        assert count("names", redis, OURS, "keys after release") == 1
        assert count("names", redis, OURS, "days that it stays") <= 14
        assert count("names", redis, OURS, "memory of each name") < 250
        assert count("names", "room for a name", "Postgres", "table and indexes") < 300
        assert count("names", "room for a name", "SQLite", "table and indexes") < 130


def test_figures_are_written_between_their_marks():
    figures = [
        Figure("save()", "plain", "time", 1.0),
        Figure("save()", "FencedModel", "time", 1.084, aim=1.1),
        Figure("hand-off", "x", "mean", 0.5, "ms", at=1),
        Figure("hand-off", "x", "mean", 12.345, "ms", at=64),
    ]
    text = "A\n<!-- figures: saves -->\nold\n<!-- end -->\nB\n<!-- figures: saves curves -->\n"
    text += "<!-- end -->\nC\n<!-- figures: machine -->\n<!-- end -->\n"
    done = page.filled(text, ["2 CPUs"], {"saves": figures})
    assert "old" not in done
    assert "| FencedModel | 1.08x (aim 1.10x) |" in done
    assert "| x | mean | 0.50 ms | 12.3 ms |" in done
    assert "* 2 CPUs\n<!-- end -->" in done
    assert [done.count(letter) for letter in ("A\n", "B\n", "C\n")] == [1, 1, 1]
    assert page.filled(done, ["2 CPUs"], {"saves": figures}) == done


def test_the_page_has_a_place_for_each_part():
    marked = [found[2] for found in page.BLOCK.finditer(page.PAGE.read_text())]
    assert {each.partition(" ")[0] for each in marked} == {"machine", *PARTS}
