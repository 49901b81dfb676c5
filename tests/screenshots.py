"""
Make the pictures of the admin and of the simulator for the documentation.

``python -m tests.screenshots`` writes them into docs/images; another directory may be named. It
needs Chromium and its chromedriver. The pages are those of the example project, in a database of
their own, with the locks of some made-up holders.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextvars import copy_context
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.browser import Browser
from tests.scripts import ROOT
from tests.servers.process import free_port, wait_until

IMAGES = ROOT / "docs/images"
WIDTH = 1200
#: Wide enough for the filters to stand beside the list.
WIDTH_OF_LIST = 1440
USER = PASSWORD = "ada"
#: Name of the lock, host, task, seconds for which it was held.
HELD = [
    ("billing.invoice:42", "worker-1", "billing.tasks.charge", 8),
    ("nightly-close", "worker-2", "accounts.tasks.close_day", 4021),
    ("shop.tasks.sync_catalog()", "worker-2", "shop.tasks.sync_catalog", 95),
    ("report:7", "web-1", "", 2),
]
#: Permits and readers: name of the lock, its kind, host, task.
SHARED = [
    *[("encode", {"limit": 4}, f"worker-{n}", "video.tasks.encode") for n in (1, 2)],
    *[("catalog", {"shared": True}, f"web-{n}", "") for n in (1, 2)],
]
PAUSED = ("billing.invoice:17", "worker-3", "billing.tasks.charge")


def main(directory: Path = IMAGES) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as data, contextlib.ExitStack() as stack:
        os.environ |= {"DJANGO_SETTINGS_MODULE": "example_project.settings", "EXAMPLE_DATA": data}
        _set_up()
        url = stack.enter_context(_site())
        _hold_locks(stack)
        page = stack.enter_context(contextlib.closing(Browser()))
        _picture_admin(page, url, directory)
        _picture_simulator(page, url, directory)


def _set_up() -> None:
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)
    from django.contrib.auth import get_user_model

    get_user_model().objects.create_superuser(USER, password=PASSWORD)


@contextlib.contextmanager
def _site() -> Iterator[str]:
    port = free_port()
    command = ["example_project", "manage", "runserver", "--noreload", str(port)]
    site = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: _answers(port), "the site to answer")
        yield f"http://127.0.0.1:{port}"
    finally:
        site.terminate()
        site.wait(20)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _hold_locks(stack: contextlib.ExitStack) -> None:
    from django.utils import timezone

    from django_fencedlock import lock
    from django_fencedlock.backends.interface import Wait
    from django_fencedlock.core.grants import new_claim
    from django_fencedlock.core.manager import service
    from django_fencedlock.models import HeldLock, LockEvent
    from django_fencedlock.test.processes import another_thread

    # The holder of this one doesn't renew it: it is paused.
    name, host, task = PAUSED
    _as_holder(host, task, lambda: service("default").grants.acquire(new_claim(name, 1), Wait()))
    _reject_a_write()
    for name, host, task, seconds in HELD:
        lease = _as_holder(host, task, lambda name=name: lock(name).acquire())
        stack.callback(lease.release)
        since = timezone.now() - timedelta(seconds=seconds)
        HeldLock.objects.filter(name=name).update(acquired_at=since)
    for name, kind, host, task in SHARED:
        # Of one thread, they would be one lease.
        thread = stack.enter_context(another_thread())
        lease = thread.call(_as_holder, host, task, lock(name, **kind).acquire)
        stack.callback(thread.call, lease.release)
    wait_until(lambda: LockEvent.objects.count() > len(HELD), "the history")
    time.sleep(1)  # The lease of the paused holder expires.


def _reject_a_write() -> None:
    """Pause a holder of invoice 42, and let it write after another holder came."""
    from django_fencedlock import StaleFence
    from django_fencedlock.test import lose_lease
    from example_project.accounts.models import Account
    from example_project.billing.models import Customer, Invoice

    account, customer = Account.objects.create(number="1000"), Customer.objects.create(name="Ada")
    row = {"number": "2026-42", "amount": 100, "account": account, "customer": customer}
    invoice = Invoice.objects.create(pk=42, **row)

    def write() -> None:
        with contextlib.suppress(StaleFence), invoice.fencing.lock() as lease:
            found = Invoice.objects.get(pk=42)
            lose_lease(lease)
            found.save()

    _as_holder("worker-3", "billing.tasks.charge", write)


def _as_holder(host: str, task: str, act: Any) -> Any:
    """Run `act` as a holder on another host, in a task."""
    from django_fencedlock.core import identity

    def run() -> Any:
        identity.running_task.set((task, f"{zlib.crc32(task.encode()):08x}" if task else ""))
        return act()

    ours, identity.socket.gethostname = socket.gethostname, lambda: host
    for cached in (identity._here, identity._place):
        cached.cache_clear()
    try:
        return copy_context().run(run)
    finally:
        identity.socket.gethostname = ours


def _picture_admin(page: Browser, url: str, directory: Path) -> None:
    page.get(f"{url}/admin/login/")
    for field in ("username", "password"):
        page.one(f"#id_{field}").send_keys(USER)
    page.one("[type=submit]").click()
    page.wait(lambda page: page.all("#logout-form"), "the login")
    page.get(f"{url}/admin/django_fencedlock/heldlock/")
    count = len(HELD) + len(SHARED) + 1
    page.wait(lambda page: len(page.all("#result_list tbody tr")) == count, "the list")
    _save(page, "#content", directory / "held_locks.png", width=WIDTH_OF_LIST)
    from django_fencedlock.models import HeldLock

    invoice = HeldLock.objects.get(name="billing.invoice:42").pk
    page.get(f"{url}/admin/django_fencedlock/heldlock/{invoice}/change/")
    _save(page, ".fencedlock-more", directory / "lock_events.png")
    page.get(f"{url}/admin/django_fencedlock/heldlock/release/?name=billing.invoice:42")
    _save(page, "#content", directory / "release.png")


def _picture_simulator(page: Browser, url: str, directory: Path) -> None:
    page.get(f"{url}/simulator/?scenario=pause&ttl=5")
    page.wait(lambda page: page.one("#step").get_attribute("aria-disabled"))
    page.one("#play").click()
    page.wait(lambda page: page.one("#next").text == "The scenario is over.", "its end")
    _save(page, "body", directory / "simulator.png")
    page.get("about:blank")


def _save(page: Browser, selector: str, path: Path, width: int = WIDTH) -> None:
    """Save the picture of one element."""
    page.show(width=width)
    height = page.run("return document.documentElement.scrollHeight")
    page.show(width=width, height=height)
    page.one(selector).screenshot(str(path))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
