"""What is done to wall clocks."""

from pathlib import Path

from tests.servers import Clock
from tests.servers.clock import missing

from .nemesis import EVERYWHERE, Fault, Lab, pause

HOUR = 3600


def jump_ahead(lab: Lab) -> None:
    """Set the lock service's clock forward: all leases are over at once."""
    clock = lab.site.clock()
    lab.crew.fill()
    lab.await_holder()
    lab.note("jump ahead")
    # Never back again in this run: a lease that was granted meanwhile would last too long.
    clock.jump(lab.random.choice([2, 60, HOUR]) * lab.ttl)
    lab.sleep(0.7, 1.5)


def jump_back(lab: Lab) -> None:
    """Set the lock service's clock back: leases of the past last for long."""
    clock = lab.site.clock()
    lab.await_holder()
    lab.note("jump back")
    clock.jump(-lab.random.uniform(1, 3) * lab.ttl)
    lab.sleep(0.7, 1.5)


def skewed(directory: Path) -> list[dict[str, str]]:
    clocks = [Clock(), Clock()]
    for clock, hours in zip(clocks, (1, -1), strict=True):
        clock.set(hours * HOUR)
    return [{}, *(clock.environment for clock in clocks)]


CLOCKED = ("rows", "mariadb", "redis", "valkey")
# SQLite has no server: its leases go by the clock of the one machine that all clients share.
ELSEWHERE = tuple(name for name in EVERYWHERE if name != "sqlite")

CLOCK_FAULTS = (
    Fault(
        "clock-ahead",
        jump_ahead,
        CLOCKED,
        {"injections": 2, "takeovers": 1, "refusals": 1},
        forgets=True,
        missing=missing,
    ),
    Fault("clock-back", jump_back, CLOCKED, {"injections": 2}, forgets=True, missing=missing),
    Fault("skew", pause, ELSEWHERE, environments=skewed, missing=missing),
)
