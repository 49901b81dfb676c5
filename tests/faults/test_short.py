"""
A few runs of the fault lab, some seconds each; ``python -m tests.faults`` does all of them.

Seeds are fixed, but not what comes of them: processes run as they will. A run that shows nothing
goes on until it does.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.faults import BY_NAME
from tests.faults.runs import CORRUPTION, HELD, VIOLATED, Plan, Result, run
from tests.faults.sites import SITES, Site
from tests.servers import ServerMissing
from tests.servers.clock import missing

#: Seconds that a run takes at least, and at the most if nothing happens.
LEAST, MOST = 2, 40


@pytest.fixture(scope="module")
def sites() -> Iterator[dict[str, Site]]:
    """The sites that were started so far: each serves all of its runs."""
    started: dict[str, Site] = {}
    yield started
    for site in started.values():
        site.close()


@pytest.fixture
def do_run(sites, tmp_path):
    def do(site: str, fault: str, **terms: Any) -> Result:
        return run(started(sites, site), plan(fault, tmp_path, **terms))

    return do


def started(sites: dict[str, Site], name: str) -> Any:
    if name not in sites:
        try:
            sites[name] = SITES[name]()
        except ServerMissing as exc:
            if os.environ.get("FENCEDLOCK_TEST_REQUIRE"):
                raise
            pytest.skip(str(exc))
    return sites[name]


def plan(fault: str, directory: Path, **terms: Any) -> Plan:
    terms = {"seed": "short", "seconds": LEAST, "most": MOST, "ttl": 0.6, "clients": 4, **terms}
    return Plan(fault=BY_NAME[fault], directory=directory, **terms)


@pytest.mark.parametrize(
    ("site", "fault"),
    [
        *((site, "pause") for site in ("sqlite", "mariadb", "postgres")),
        *(("redis", "fail-over"), ("rows", "lose-replies"), ("redis", "celery-pause")),
    ],
)
def test_nothing_stale_gets_through(do_run, site, fault):
    result = do_run(site, fault)
    assert result.verdict == HELD, str(result)
    assert not result.hung, str(result)


def test_without_fencing_the_same_run_is_found_corrupt(do_run):
    result = do_run("postgres", "pause", fenced=False)
    assert result.verdict == VIOLATED, str(result)
    assert {each.promise for each in result.violations} <= CORRUPTION, str(result)


@pytest.mark.parametrize("kind", ["permits", "shared"])
class TestKinds:
    @pytest.mark.parametrize("site", ["rows", "redis", "postgres"])
    def test_nothing_stale_gets_through(self, do_run, site, kind):
        result = do_run(site, "pause", kind=kind, clients=6)
        assert result.verdict == HELD, str(result)
        assert not result.hung, str(result)

    def test_without_fencing_updates_are_lost(self, do_run, kind):
        result = do_run("rows", "pause", kind=kind, clients=6, fenced=False)
        assert result.verdict == VIOLATED, str(result)
        promises = {each.promise for each in result.violations}
        assert "I5" in promises <= CORRUPTION, str(result)


def test_a_clock_is_that_of_the_server_that_took_over():
    if why := missing():
        pytest.skip(why)
    with contextlib.closing(started({}, "redis")) as site:
        site.clock()
        site.redis = site.launch(replica_of=site.redis)
        site.redis.promote()
        site.clock().jump(3600)
        assert int(site.redis.execute("TIME")[0]) > time.time() + 3000
