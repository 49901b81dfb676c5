"""Permits and readers in the admin."""

import html
import re

import pytest
from django.contrib.admin.models import LogEntry
from django.db.models import F

from django_fencedlock import lock
from django_fencedlock.admin import locks
from django_fencedlock.admin.kinds import BY_NUMBER
from django_fencedlock.core.manager import service
from django_fencedlock.core.names import permit_name
from django_fencedlock.models import HeldLock
from tests.backends import REDIS
from tests.test_admin import LIST
from tests.test_admin_releasing import RELEASE, confirm, log_in, marks, told

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def anna(client):
    return log_in(client, "view_heldlock", "release_heldlock")


def read(answer):
    """Return the text of a page."""
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", answer.content.decode(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", text)).split())


def listed(client, **query):
    page = client.get(LIST, query).content.decode().partition("<tbody>")[2]
    rows = re.findall(r"<tr.*?</tr>", page, re.DOTALL)
    cells = [
        re.search(r'field-lock_name">(.*?)</th>.*field-kind">(.*?)</td>', row, re.DOTALL)
        for row in rows
    ]
    return [tuple(re.sub("<[^>]*>", "", each).strip() for each in cell.groups()) for cell in cells]


def page_of(lease):
    row = HeldLock.objects.get(owner=lease.owner_id)
    return f"{LIST}{row.pk}/change/"


def follow(client, url, title):
    page = client.get(url).content.decode()
    return client.get(html.unescape(re.search(rf'href="([^"]*)"[^>]*>{title}<', page)[1]))


@pytest.fixture
def readers(holders):
    return [holders.acquire(lock("catalog", shared=True)) for _ in range(3)]


class TestList:
    def test_kinds_and_their_filter(self, anna, holders):
        with lock("gpu"):
            for number in (10, 2):
                holders.permit("gpu", number, 12)
            holders.acquire(lock("catalog", shared=True))
            # It leaves a note for readers, which isn't a lock.
            assert lock("catalog").acquire(blocking=False) is None
            one, ten, two, reader = listed(anna)
            assert one == ("gpu", "kind \N{EN DASH}")
            assert ten == ("gpu [permit 10]", "kind permit 10 of 12")
            assert two == ("gpu [permit 2]", "kind permit 2 of 12")
            assert reader == ("catalog", "kind reader")
            assert listed(anna, kind="exclusive") == [one]
            assert listed(anna, kind="permit") == [ten, two]
            assert listed(anna, kind="reader") == [reader]
            assert listed(anna, kind="nothing") == listed(anna)
            # The first column has the checkboxes.
            assert listed(anna, o="1") == [reader, one, two, ten]
            assert listed(anna, o="-1") == [ten, two, one, reader]

    @pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
    def test_the_numbers_of_permits_have_their_order(self, using, settings):
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": using}}
        numbers = 1, 2, 9, 10, 11, 99, 100, 999, 1000
        wanted = [permit_name("gpu", number) for number in numbers]
        wanted += [permit_name("\N{SNOWMAN}", 3), permit_name("\N{SNOWMAN}", 20)]
        with lock("x"):
            row = HeldLock.objects.using(using).get()
        fields = {each.attname: getattr(row, each.attname) for each in HeldLock._meta.fields}
        for number, name in enumerate(reversed(wanted)):
            made = {**fields, "id": number, "name": name, "permits": 1000}
            HeldLock(**made).save(using=using, force_insert=True)
        with lock("a"):
            found = HeldLock.objects.using(using).exclude(name="x").order_by(BY_NUMBER)
            assert [each.name for each in found] == ["a", *wanted]


class TestPage:
    def test_a_permit(self, anna, holders):
        lease = holders.permit("gpu", 10, 12)
        second = holders.permit("gpu", 2, 12)
        expired = holders.permit("gpu", 4, 12)
        HeldLock.objects.filter(name=expired.name).update(expires_at=F("acquired_at"))
        holders.permit("gpu:other", 1, 2)
        answer = anna.get(page_of(lease))
        page = read(answer)
        assert "Kind: kind permit 10 of 12" in page
        assert "Permits of gpu: 2 of 12 used" in page
        assert "Free: 1, 3-9, 11-12" in page
        table = page.partition("2 of 12 used")[2]
        assert re.findall(r"Permit (\d+)", table) == ["2", "4", "10"]
        assert f'href="{page_of(second)}"' in answer.content.decode()
        assert "Release all readers" not in page

    def test_a_reader(self, anna, readers):
        page = read(anna.get(page_of(readers[1])))
        assert "Kind: kind reader" in page
        assert "Readers of catalog: 3" in page
        assert "Release this reader by force" in page
        assert "Release all readers by force" in page

    def test_an_exclusive_lock(self, anna):
        with lock("invoice:1") as lease:
            page = read(anna.get(page_of(lease)))
        assert "Permits of" not in page
        assert "Readers of" not in page
        assert "Release by force" in page

    def test_without_the_permission(self, client, readers):
        log_in(client, "view_heldlock")
        page = read(client.get(page_of(readers[0])))
        assert "Readers of catalog: 3" in page
        assert "by force" not in page

    def test_an_unavailable_service(self, anna, settings, make_redis):
        server = make_redis()
        settings.FENCEDLOCK = {"default": {"BACKEND": REDIS, "LOCATION": server.url}}
        lease = lock("gpu", limit=3).acquire()
        server.kill()
        page = read(anna.get(page_of(lease)))
        assert "Permits of gpu: 1 of 3 used" in page
        service("default").drop_all()


class TestRelease:
    def test_one_permit(self, anna, holders):
        kept, lease = holders.permit("gpu", 1, 3), holders.permit("gpu", 2, 3)
        asked = anna.get(RELEASE, {"name": lease.name})
        assert "gpu [permit 2] Kind permit 2 of 3 Holder" in read(asked)
        assert marks(asked) == [lease.owner_id]
        assert [level for level, _ in told(confirm(anna, asked))] == ["success"]
        assert (kept.verify(), lease.verify()) == (True, False)

    def test_one_reader(self, anna, readers):
        asked = follow(anna, page_of(readers[1]), "Release this reader by force")
        page = read(asked)
        assert "Kind 1 of 3 readers" in page
        assert "transactions under the leases of all readers are rejected from then on" in page
        assert [level for level, _ in told(confirm(anna, asked))] == ["success"]
        assert [each.verify() for each in readers] == [True, False, True]

    def test_all_readers(self, anna, readers):
        asked = follow(anna, page_of(readers[1]), "Release all readers by force")
        page = read(asked)
        assert page.count("catalog Kind 3 of 3 readers Holder") == 1
        assert page.count("The fence is raised first") == 1
        assert marks(asked) == [each.owner_id for each in readers]
        ((level, text),) = told(confirm(anna, asked))
        assert level == "success"
        assert "Further readers that lost it: 2." in text
        assert not any(each.verify() for each in readers)
        assert LogEntry.objects.count() == 3

    def test_a_reader_that_came_since_keeps_the_lock(self, anna, readers, holders):
        asked = anna.get(RELEASE, {"name": "catalog"})
        late = holders.acquire(lock("catalog", shared=True))
        confirm(anna, asked)
        assert late.verify()
        assert not any(each.verify() for each in readers)

    def test_more_readers_than_a_page_can_release(self, anna, readers, monkeypatch):
        monkeypatch.setattr(locks, "MAX_LOCKS", 2)
        answer = anna.get(RELEASE, {"name": "catalog"})
        assert answer.url == LIST
        assert told(answer) == [
            (
                "error",
                "At most 2 readers can be released here. For all, run: "
                "manage.py fencedlock release catalog",
            )
        ]
        assert all(each.verify() for each in readers)

    def test_the_action_with_all_kinds(self, anna, readers, holders):
        permit = holders.permit("gpu", 2, 3)
        with lock("a") as lease:
            owners = [each.owner_id for each in (*readers[:2], permit, lease)]
            ids = HeldLock.objects.filter(owner__in=owners).values_list("pk", flat=True)
            data = {"action": "release_by_force", "_selected_action": list(ids)}
            asked = anna.post(LIST, data)
            page = read(asked)
            assert "Kind 2 of 3 readers" in page
            assert "Kind permit 2 of 3" in page
            assert len(marks(asked)) == 4
