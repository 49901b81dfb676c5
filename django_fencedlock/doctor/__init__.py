"""Tries each lock service for real, and looks at what fenced writes rest on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from django.db import connections

from .. import checks, conf
from ..findings import Finding, Level, error, ok
from ..lease import clock
from . import databases, probe
from .problems import of_problems

__all__ = ["LIMIT", "Report", "examine"]

#: Seconds for each alias and each database.
LIMIT = 20.0


@dataclass
class Report:
    """What was found about one thing."""

    about: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def level(self) -> Level:
        return max((finding.level for finding in self.findings), default=Level.OK)


def examine(aliases: Sequence[str] = (), limit: float = LIMIT) -> Iterator[Report]:
    """
    Examine settings, models and tasks, then the fences' databases, then each alias.

    Where no alias is named, the other databases that have fenced tables, too.
    """
    yield Report("settings, models and tasks", list(_code()))
    if any(problem.is_error for problem in conf.problems()):
        return
    broken = set()
    configs = [conf.config(alias) for alias in aliases or conf.aliases()]
    with_fences = list(dict.fromkeys(config.fence_database for config in configs))
    for database in with_fences:
        report = Report(f"database {database!r}", list(databases.examine(database, limit)))
        yield report
        if report.level is Level.ERROR:
            broken.add(database)
    for database in [] if aliases else connections:
        if database not in with_fences:
            found = list(databases.examine_rows(database, limit))
            if found:
                yield Report(f"database {database!r} (rows alone)", found)
    for config in configs:
        label = conf.backend_class(config.backend).label
        report = Report(f"alias {config.alias!r} ({label})")
        if config.fence_database in broken:
            report.findings.append(_untried(config.fence_database))
        else:
            report.findings += probe.examine(config, clock() + limit)
        yield report


def _code() -> Iterator[Finding]:
    found = checks.problems()
    yield from of_problems(found)
    if not found:
        yield ok("this package's checks of settings, models and Celery tasks found nothing")


def _untried(database: str) -> Finding:
    return error(
        f"not tried: its grants are recorded in database {database!r}",
        "See to that database first.",
    )
