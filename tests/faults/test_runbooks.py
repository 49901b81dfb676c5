"""What the pages say to do when a promise can't be kept: it heals what was broken."""

import contextlib
import io
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import connections

from django_fencedlock import LeaseLost, StaleFence, lock
from django_fencedlock.backends.interface import Wait
from django_fencedlock.core.grants import new_claim
from django_fencedlock.core.manager import service
from django_fencedlock.lease import Lease
from django_fencedlock.models import Fence, HeldLock
from django_fencedlock.ops import resync
from tests.backends import REDIS
from tests.models import Invoice
from tests.test_resync import ON_ALL
from tests.test_write_paths import Everything

TTL = 5
PAGE = Path(__file__).parent.parent.parent / "docs/guides/troubleshooting.md"

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def redis_gone_back(settings, make_redis, make_clock):
    """A Redis whose clock was set back an hour under a holder who then died."""
    server, watch = make_redis(), make_clock()
    server.go_by(watch)
    backend = REDIS
    settings.FENCEDLOCK = {"default": {"BACKEND": backend, "LOCATION": server.url}}
    # Acquired without a keeper, so that it isn't renewed: as by a holder on another machine.
    service("default").backend.acquire(new_claim("x", TTL), Wait())
    watch.jump(-3600)
    yield
    service("default").drop_all()


def test_a_clock_set_back_keeps_a_dead_holders_lock(redis_gone_back):
    time.sleep(TTL)
    assert lock("x").acquire(blocking_timeout=TTL) is None


# docs/guides/troubleshooting.md; `resync` itself has tests of its own, on every database

TABLES = [model._meta.db_table for model in (Fence, HeldLock, Invoice)]


@pytest.fixture
def on(database, settings):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": database}}
    settings.DATABASE_ROUTERS = [Everything(database)]
    yield connections[database]
    service("default").drop_all()


def backup(connection):
    found = {}
    with connection.cursor() as cursor:
        for table in TABLES:
            cursor.execute(f"SELECT * FROM {table}")
            found[table] = ([each[0] for each in cursor.description], cursor.fetchall())
    return found


def restore(connection, found, tables=TABLES):
    """Restore the tables without the ORM, whose checks would reject the change."""
    with connection.cursor() as cursor:
        for table in tables:
            columns, rows = found[table]
            cursor.execute(f"DELETE FROM {table}")
            marks = ", ".join(["%s"] * len(columns))
            for row in rows:
                cursor.execute(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", row)


def hand_over(invoice):
    """Write under a new grant. Return its lease, which is still held, and the row."""
    lease = invoice.fencing.lock().acquire()
    mine = Invoice.objects.get(pk=invoice.pk)
    mine.amount += 1
    mine.save(lease=lease)
    return lease, mine


@ON_ALL
def test_after_a_restore_of_everything_former_holders_are_refused(on):
    invoice = Invoice.objects.create()
    hand_over(invoice)[0].release()
    before = backup(on)
    former, row = hand_over(invoice)
    restore(on, before)
    # As far as the database knows, the former holder never had the lock.
    now = new_holder(invoice)
    assert now.token == former.token
    with pytest.raises(StaleFence):
        row.save(lease=former)
    with pytest.raises(StaleFence), former.atomic():
        pass
    mine = Invoice.objects.get(pk=invoice.pk)
    mine.save(lease=now)
    assert mine.fence == now.token


def new_holder(invoice):
    """Return a lease of another process, which isn't renewed."""
    claim = new_claim(invoice.fencing.name(), 30)
    found = service("default")
    grant, since = found.grants.acquire(claim, Wait())
    return Lease(grant, found, since=since, database=found.config.fence_database)


@ON_ALL
def test_rows_that_are_older_than_their_fences_need_nothing(on):
    """As after a crash with synchronous_commit off, or a restore of the rows alone."""
    invoice = Invoice.objects.create()
    hand_over(invoice)[0].release()
    before = backup(on)
    lease, _ = hand_over(invoice)
    lease.release()
    restore(on, before, [Invoice._meta.db_table])
    lease, mine = hand_over(invoice)
    assert mine.fence == lease.token == 3
    (model,) = resync.models(["tests.Invoice"])
    assert not resync.resync(model, dry_run=True).low


@ON_ALL
def test_the_statement_for_services_outside_raises_all_fences_and_their_holders_lose(on):
    invoice = Invoice.objects.create()
    former, row = hand_over(invoice)
    statement = re.search(r"```sql\n(UPDATE .*?_fence .*?;)\n```", PAGE.read_text())[1]
    with on.cursor() as cursor:
        cursor.execute(statement)
    with pytest.raises(StaleFence):
        row.save(lease=former)
    with contextlib.suppress(LeaseLost):
        former.release()
    assert hand_over(invoice)[0].token == 1_000_002


@pytest.fixture
def old_file(settings, make_redis):
    """A Redis that starts from a file in which a former holder has the lock; and who has it now."""
    server = make_redis("--dbfilename", "kept.rdb")
    backend = REDIS
    settings.FENCEDLOCK = {"default": {"BACKEND": backend, "LOCATION": server.url}}
    former = lock("x", ttl=30).acquire()
    server.execute("SAVE")
    former.release()
    with ThreadPoolExecutor(1) as elsewhere:
        now = elsewhere.submit(lock("x", ttl=30).acquire).result()
    server.kill()
    server.start()
    yield former, now
    service("default").drop_all()


def test_a_redis_from_an_old_file_has_a_shadow_of_a_holder(old_file):
    former, now = old_file
    assert lock("x").holder().owner_id == former.owner_id
    # No other holder has acquired it, but the service has lost the current holder.
    assert not now.verify()
    assert now.lost
    assert lock("x", blocking_timeout=0).acquire() is None


def test_released_by_force_it_is_free_and_tokens_go_on_from_the_fence(old_file):
    former, now = old_file
    # As in docs/guides/troubleshooting.md, for the holder that the lock service has.
    out = io.StringIO()
    call_command("fencedlock", "release", "x", "--yes", stdout=out)
    assert "released by force" in out.getvalue()
    after = lock("x", blocking_timeout=0).acquire()
    assert after.token > now.token > former.token
    assert after.verify()
    with pytest.raises(StaleFence), now.atomic():
        pass
