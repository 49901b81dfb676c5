"""
How long it takes to tell who has each of many session locks: the admin's page, and what it asks.

Run from the top of the checkout: ``python -m benchmarks.listing``. Locks are held on the postgres
backend, ever more of them; what is told is the shortest of a few tries.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from benchmarks import project
from benchmarks.processor import computed
from benchmarks.report import COUNTED, OURS, Report, options

WORK = "page of held locks"
STEPS = (100, 1000, 10_000)
TRIES = 5
#: Milliseconds in which the page should be there, however many locks are held.
AIM = 200

_CONTRIB = ("admin", "auth", "contenttypes", "sessions", "messages")
_SETTINGS = {
    "INSTALLED_APPS": [f"django.contrib.{app}" for app in _CONTRIB],
    "ROOT_URLCONF": "benchmarks.urls",
    "ALLOWED_HOSTS": ["testserver"],
    "SECRET_KEY": "of a site that nobody visits",
    "MIDDLEWARE": [
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    "TEMPLATES": [
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "APP_DIRS": True,
            "OPTIONS": {
                "context_processors": [
                    "django.template.context_processors.request",
                    "django.contrib.auth.context_processors.auth",
                    "django.contrib.messages.context_processors.messages",
                ]
            },
        }
    ],
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, nargs="*", default=STEPS)
    given = parser.parse_args()
    steps = [100, 400] if given.short else sorted(given.steps)
    report = Report(given)
    # At default settings some 12,800 locks fill the server's table.
    room = {"max_locks_per_transaction": "256"}
    with project.started(postgres=room, settings=_SETTINGS, MAX_LOCKS=2 * steps[-1]) as servers:
        print(
            f"load {os.getloadavg()[0]:.1f}\n"
            "locks held             ms   client's and server's CPU in ms, queries"
        )
        page = _page()
        for step in steps:
            _report(step, page, servers.postgres.process.pid, report, last=step == steps[-1])


def _page() -> Callable[[], object]:
    """Look at the page, as a superuser who is logged in."""
    from django.contrib.auth import get_user_model
    from django.test import Client
    from django.urls import reverse

    browser = Client(raise_request_exception=True)
    browser.force_login(get_user_model().objects.create_superuser("ada"))
    address = reverse("admin:django_fencedlock_heldlock_changelist")

    def page() -> None:
        assert browser.get(address).status_code == 200

    return page


def _report(step: int, page: Callable[[], object], server: int, report: Report, last: bool) -> None:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    from django_fencedlock import lock
    from django_fencedlock.core.manager import service

    names = [f"listed:{number}" for number in range(step)]
    for name in names:
        assert lock(name, backend="postgres", ttl=3600).acquire(blocking=False)
    backend = service("postgres").backend
    page()
    with CaptureQueriesContext(connection) as queries:
        page()
    # Read now: each request begins the list anew.
    asked = len(queries)
    report.add(WORK, OURS, "queries", asked, COUNTED, at=step)
    for who, ask in (
        ("all of their holders", lambda: backend.holders(names)),
        ("the admin's page", page),
    ):
        found = [_measure(ask, server) for _ in range(TRIES)]
        elapsed, client, theirs = (min(part) * 1000 for part in zip(*found, strict=True))
        told = f"{step:10} {who:22} {elapsed:7.1f}   {client:.1f} + {theirs:.1f}"
        print(told, f"  {asked}" if ask is page else "", flush=True)
        aim = AIM if ask is page and last else None
        report.add(WORK, who, "time", elapsed, "ms", at=step, aim=aim)
        report.add(WORK, who, "CPU time", client + theirs, "ms", at=step, aim=aim)


def _measure(ask: Callable[[], object], server: int) -> tuple[float, float, float]:
    theirs, ours, began = computed([server]), time.process_time(), time.perf_counter()
    ask()
    ended, spent = time.perf_counter(), time.process_time()
    return ended - began, spent - ours, computed([server]) - theirs


if __name__ == "__main__":
    main()
