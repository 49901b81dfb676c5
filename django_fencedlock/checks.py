"""System checks: what is wrong with the settings, and, if asked, with the lock services."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, Warning, register

from . import conf
from .services import service


@register(Tags.compatibility)
def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """Look at the settings alone."""
    return _messages(conf.problems())


@register(Tags.database)
def check_services(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Ask the lock services themselves; run by ``check --database ALIAS``."""
    if not databases or any(not problem.warning for problem in conf.problems()):
        return []
    return _messages(_live_problems(databases))


def _live_problems(databases: Sequence[str]) -> Iterator[conf.Problem]:
    for alias in conf.aliases():
        if conf.config(alias).fence_database in databases:
            yield from service(alias).backend.live_problems()


def _messages(problems: Iterable[conf.Problem]) -> list[CheckMessage]:
    return [
        (Warning if problem.warning else Error)(
            problem.message, hint=problem.hint or None, id=f"django_fencedlock.{problem.id}"
        )
        for problem in problems
    ]
