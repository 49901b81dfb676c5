"""The times of the tables: in UTC, whatever USE_TZ and the TIME_ZONE of a database say."""

import contextlib
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connections
from django.test import override_settings

from django_fencedlock import force_release, lock
from django_fencedlock.models import ForcedRelease, HeldLock
from django_fencedlock.ops.registry import State, listing
from django_fencedlock.storage import dialect
from django_fencedlock.storage.fences import notes
from tests.threads import elsewhere

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
#: Clocks in Berlin go back at 01:00 UTC, from 03:00 to 02:00.
CLOCKS_GO_BACK = datetime(2026, 10, 25, 1, 0, tzinfo=UTC)

pytestmark = pytest.mark.django_db(transaction=True, databases={"default", "postgres", "mariadb"})


@contextlib.contextmanager
def in_zone(alias, zone):
    entry = connections.settings[alias]
    before = entry["TIME_ZONE"]
    connections[alias].close()
    del connections[alias]
    entry["TIME_ZONE"] = zone
    try:
        yield
    finally:
        connections[alias].close()
        del connections[alias]
        entry["TIME_ZONE"] = before


@pytest.fixture(params=["default", "postgres", "mariadb"])
def database(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["database in a zone", "naive times"])
def zone(request, database):
    settings = {"USE_TZ": request.param, "TIME_ZONE": NEW_YORK}
    settings["FENCEDLOCK"] = {"default": {"FENCE_DATABASE": database}}
    with override_settings(**settings), in_zone(database, BERLIN if request.param else None):
        yield


def from_now(moment):
    assert moment.utcoffset() == timedelta(0)
    return (moment - datetime.now(UTC)).total_seconds()


@pytest.mark.usefixtures("zone")
class TestEachZone:
    def test_the_registry_has_utc(self, database):
        with lock("x", ttl=300), connections[database].cursor() as cursor:
            text = "CAST(expires_at AS char(19))"
            if database == "postgres":
                text = "to_char(expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')"
            cursor.execute(f"SELECT {text} FROM django_fencedlock_heldlock")
            stored = datetime.fromisoformat(cursor.fetchone()[0][:19]).replace(tzinfo=UTC)
        assert 200 < from_now(stored) <= 300

    def test_a_holder_is_shown_in_utc(self):
        with lock("x", ttl=300):
            holder = lock("x").holder()
            assert 200 < from_now(holder.expires_at) <= 300
            assert -100 < from_now(holder.acquired_at) <= 0

    def test_the_listing_is_in_utc(self):
        with lock("x", ttl=300):
            [entry] = listing().entries
        assert entry.state is State.HELD
        assert 200 < entry.remaining <= 300
        assert 0 <= entry.held_for < 100
        assert 200 < from_now(entry.expires_at) <= 300

    def test_the_orm_reads_and_compares_utc(self, database):
        rows = HeldLock.objects.using(database)
        with lock("x", ttl=300):
            now = datetime.now(UTC)
            assert 200 < from_now(rows.get().expires_at) <= 300
            assert rows.filter(expires_at__gt=now, acquired_at__lt=now + timedelta(seconds=100))
            assert not rows.filter(expires_at__lt=now)

    @pytest.mark.parametrize("hour", [5, 6])
    def test_an_hour_that_clocks_repeat_is_stored_and_read_as_two(self, database, hour):
        moment = datetime(2026, 11, 1, hour, 30, tzinfo=UTC)
        rows = ForcedRelease.objects.using(database)
        rows.create(owner="o", name="x", released_by="me", released_at=moment)
        assert rows.get(released_at=moment).released_at == moment
        assert notes(database, ["o"])["o"].at == moment

    def test_the_other_tables_have_utc(self, database):
        lock("x").acquire()
        force_release("x", by="me")
        assert -100 < from_now(ForcedRelease.objects.using(database).get().released_at) <= 0

    def test_the_admin_knows_how_much_time_is_left(self, admin_client, database):
        with lock("x", ttl=300):
            page = admin_client.get("/admin/django_fencedlock/heldlock/").content.decode()
        assert "fencedlock-state fencedlock-held" in page


def test_a_lease_on_sqlite_lasts_while_clocks_go_back(settings, monkeypatch):
    moment = CLOCKS_GO_BACK - timedelta(seconds=10)
    monkeypatch.setattr(dialect, "machine_time", lambda: moment)
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "default"}}
    with in_zone("default", BERLIN), lock("x", ttl=30):
        moment += timedelta(seconds=1)
        assert elsewhere(lock("x", ttl=30).acquire, blocking=False) is None
