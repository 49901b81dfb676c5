"""The pages of locks in a real browser."""

from datetime import timedelta
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client
from django.utils import timezone
from selenium.webdriver.common.keys import Keys

from django_fencedlock import lock
from django_fencedlock.models import Fence, HeldLock, LockEvent
from tests.backends import REDIS
from tests.models import Document

pytestmark = pytest.mark.django_db(transaction=True)

STATUS = "#fencedlock-refresh span"

FAINT = (Path(__file__).parent / "contrast.js").read_text()


@pytest.fixture
def page(browser, live_server, client):
    client.force_login(User.objects.create_superuser("boss", password="x"))
    browser.log_in(client, live_server.url)
    browser.open = lambda path="heldlock/": browser.get(
        f"{live_server.url}/admin/django_fencedlock/{path}"
    )
    yield browser
    # Otherwise it may ask for the next refresh while the database is emptied.
    browser.get("about:blank")


def hold(count, start=0):
    with lock("a row to copy"):
        row = HeldLock.objects.get(name="a row to copy")
    now = timezone.now()
    rows, fences = [], []
    for number in range(start, start + count):
        fields = {each.attname: getattr(row, each.attname) for each in row._meta.concrete_fields}
        left = (25, 5, -90)[number % 3]
        name = (f"invoice:{number}", f"shop:{'0714a454-1c2e-4f7e-' * 5}{number}", f"n:{number}")
        task = number % 3 and f"billing.tasks.{'charge_the_customer_' * 2}{number % 3}"
        fields |= {
            "id": number + 1,
            "name": name[number % 3],
            "owner": f"{number:032x}",
            "fenced": bool(number % 2),
            "host": f"worker-{number % 3}.eu-west-1.example.com",
            "task_name": task or "",
            "task_id": "0714a454-1c2e-4f7e-9a51-0123456789ab" if task else "",
            "acquired_at": now - timedelta(seconds=(12, 7700, 340_000)[number % 3]),
            "renewed_at": now - timedelta(seconds=30 - left),
            "expires_at": now + timedelta(seconds=left),
        }
        rows.append(HeldLock(**fields))
        if fields["fenced"]:
            fences.append(Fence(name=fields["name"], token=1_234_567, owner=fields["owner"]))
    HeldLock.objects.bulk_create(rows, batch_size=1000)
    Fence.objects.bulk_create(fences, batch_size=1000)
    return [each.name for each in rows]


def names(page):
    every = "[...document.querySelectorAll('#result_list .field-lock_name a')]"
    return page.run(f"return {every}.map((each) => each.textContent)")


def box_of(page, name):
    return page.one(f'.action-select[value="{HeldLock.objects.get(name=name).pk}"]')


def refresh(page):
    page.run("document.dispatchEvent(new Event('visibilitychange'))")


def count_questions(page):
    page.run(
        "window.asked = 0; const ask = window.fetch;"
        "window.fetch = (...terms) => { window.asked += 1; return ask(...terms); };"
    )


def wait_for_names(page, expected):
    page.wait(lambda page: names(page) == expected, f"not {expected}")


class TestRefresh:
    def test_a_refresh_keeps_selection_scroll_position_and_typed_text(self, page):
        held = hold(60)
        page.open("heldlock/?o=-1.2")
        shown = names(page)
        page.run("scrollTo(0, 700)")
        for number in (20, 25):
            page.all("input.action-select")[number].click()
        marked = [shown[20], shown[25]]
        page.one("#searchbar").send_keys("half-ty")
        before = page.run("return scrollY")
        late, gone = hold(1, start=999_999)[0], shown[-1]
        HeldLock.objects.filter(name=gone).delete()
        refresh(page)
        page.wait(lambda page: late in names(page), "the lock that came late")
        assert gone not in names(page)
        assert page.run("return scrollY") == before
        checked = page.all("tr:has(input.action-select:checked) .field-lock_name a")
        assert [each.text for each in checked] == marked
        assert page.one(".action-counter").text == f"2 of {len(held)} selected"
        assert page.one("#searchbar").get_attribute("value") == "half-ty"
        page.driver.switch_to.active_element.send_keys("ped")
        assert page.one("#searchbar").get_attribute("value") == "half-typed"

    def test_new_locks_can_be_selected_and_released_ones_are_deselected(self, page):
        hold(3)
        page.open()
        page.all("input.action-select")[0].click()
        first, *rest = names(page)
        HeldLock.objects.filter(name=first).delete()
        late = hold(1, start=4)
        refresh(page)
        page.wait(lambda page: late[0] in names(page), "the lock that came late")
        assert set(names(page)) == {*rest, *late}
        assert page.one(".action-counter").text == "0 of 3 selected"
        page.one("#action-toggle").click()
        assert page.one(".action-counter").text == "3 of 3 selected"
        assert page.run("return document.querySelectorAll('tr.selected').length") == 3
        choose_action(page)
        assert {each.text for each in page.all(".fencedlock-locks h2")} == {*rest, *late}

    def test_a_refresh_keeps_focus_and_waits_for_marked_text(self, page):
        hold(3)
        page.open()
        link = page.all("#result_list .field-lock_name a")[1]
        page.run("arguments[0].focus()", link)
        HeldLock.objects.filter(name=names(page)[0]).delete()
        left = names(page)[1:]
        refresh(page)
        wait_for_names(page, left)
        assert page.driver.switch_to.active_element.text == left[0]
        page.run("getSelection().selectAllChildren(document.querySelector('.field-holder'))")
        HeldLock.objects.all().delete()
        count_questions(page)
        refresh(page)
        assert page.run("return window.asked") == 0
        page.run("getSelection().removeAllRanges()")
        refresh(page)
        wait_for_names(page, [])

    def test_from_an_empty_list_to_locks_and_back(self, page):
        page.open()
        page.one("#searchbar").send_keys("typed")
        held = hold(2)
        refresh(page)
        page.wait(lambda page: set(names(page)) == set(held), "the locks")
        page.one("#action-toggle").click()
        assert page.one(".action-counter").text == "2 of 2 selected"
        HeldLock.objects.all().delete()
        refresh(page)
        wait_for_names(page, [])
        assert "0 held locks" in page.one("#changelist-form").text
        assert page.one("#searchbar").get_attribute("value") == "typed"
        assert page.complaints() == []

    def test_it_refreshes_by_itself_and_silently(self, page):
        page.open()
        page.run(
            "new MutationObserver((all) => { window.told = (window.told || 0) + all.length; })"
            ".observe(document.querySelector('#fencedlock-refresh'),"
            " {subtree: true, childList: true, characterData: true});"
        )
        held = hold(1)
        wait_for_names(page, held)
        assert page.run("return window.told || 0") == 0
        assert page.one("#fencedlock-notices").get_attribute("role") == "status"

    @pytest.mark.parametrize("hangs", [False, True])
    def test_an_unreachable_server_is_reported_until_it_answers(self, page, hangs):
        page.open()
        if hangs:
            page.run(
                "const wait = setTimeout;"
                "window.setTimeout = (what, time) => wait(what, time / 50);"
                "window.fetch = () => new Promise(() => {});"
            )
        page.offline(not hangs)
        refresh(page)
        page.wait(lambda page: "be refreshed" in page.one(STATUS).text, "the complaint")
        page.offline(False)
        if not hangs:
            refresh(page)
            page.wait(lambda page: page.one(STATUS).text == "Refreshes every 5 seconds.", "the end")


class TestPause:
    def test_it_is_remembered_and_works_by_keyboard(self, page):
        hold(1)
        page.open()
        button = page.one("#fencedlock-refresh button")
        assert (button.text, button.get_attribute("type")) == ("Pause", "button")
        page.run("document.querySelector('#searchbar').focus()")
        for _ in range(10):
            page.driver.switch_to.active_element.send_keys("\ue004")
            if page.driver.switch_to.active_element == button:
                break
        style = page.run("return getComputedStyle(document.activeElement).outlineStyle")
        assert style != "none"
        button.send_keys("\ue007")
        assert (button.text, page.one(STATUS).text) == ("Resume", "Paused.")
        page.driver.refresh()
        assert page.one("#fencedlock-refresh button").text == "Resume"
        late = hold(1, start=1)
        count_questions(page)
        refresh(page)
        assert page.run("return window.asked") == 0
        page.one("#fencedlock-refresh button").click()
        page.wait(lambda page: late[0] in names(page), "the lock that came late")


def test_without_javascript(page):
    hold(3)
    page.script(False)
    page.open()
    assert not page.one("#fencedlock-refresh").is_displayed()
    assert len(names(page)) == 3
    page.driver.find_element("link text", "expired").click()
    assert names(page) == ["n:2"]
    page.one("#result_list .field-lock_name a").click()
    assert "The lease has expired" in page.one("#content").text
    page.open()
    box_of(page, "n:2").click()
    choose_action(page)
    page.one('button[value="release"]').click()
    assert "was released by force" in message(page).text


def test_an_unavailable_service(page, settings, make_redis):
    server = make_redis()
    redis = {"BACKEND": REDIS, "LOCATION": server.url, "OPTIONS": {"TIMEOUT": 0.5}}
    settings.FENCEDLOCK = {"default": redis}
    lock("invoice:42").acquire()
    page.open()
    assert page.one("#fencedlock-notices").text == ""
    server.kill()
    refresh(page)
    page.wait(lambda page: "is unavailable" in page.one("#fencedlock-notices").text, "the notice")
    assert page.one(".fencedlock-state").text == "unknown"
    assert names(page) == ["invoice:42"]
    assert page.run(FAINT, "#content") == []


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_an_unavailable_database(page, settings, monkeypatch):
    settings.FENCEDLOCK = {"default": {}, "far": {"FENCE_DATABASE": "postgres"}}
    monkeypatch.setitem(connections["postgres"].settings_dict, "PORT", "1")
    for look in looks(page):
        page.open("heldlock/?database=postgres")
        assert "Database postgres is unavailable" in page.one("#content").text
        assert not page.scrolls_sideways(), look
        assert page.run(FAINT, "#content") == [], look
    page.driver.find_element("link text", "default").send_keys("\ue007")
    page.wait(lambda page: "0 held locks" in page.one("#content").text, "the other database")


@pytest.mark.parametrize("count", [0, 3, 10_000])
def test_how_the_list_looks(page, count):
    hold(count)
    for each in HeldLock.objects.all()[: min(count, 3)]:
        event(each.name, times=12)
    for look in looks(page):
        page.open()
        is_fine(page, look)
        assert len(names(page)) == min(count, 100)


def test_how_the_other_pages_look(page):
    (name,) = hold(1, start=1)
    for kind in LockEvent.Kind.values:
        event(name, kind, times=3)
    for look in looks(page):
        page.open()
        page.one("#result_list .field-lock_name a").click()
        assert "released by force" in page.one("#content").text
        assert page.run(BROKEN) == [], look
        is_fine(page, look)
        page.open("lockevent/")
        assert len(page.all("#result_list tbody tr")) == 4
        is_fine(page, look)


BROKEN = """
const first = (cell) => {
    const range = document.createRange();
    range.setStart(cell.firstChild, 0);
    range.setEnd(cell.firstChild, cell.firstChild.data.search(/\\s|$/));
    return range;
};
return [...document.querySelectorAll("[aria-labelledby=fencedlock-history] td:nth-child(2)")]
    .filter((cell) => first(cell).getClientRects().length > 1)
    .map((cell) => cell.textContent);
"""


def looks(page):
    for width in (1280, 400):
        for dark in (False, True):
            page.show(width=width, dark=dark)
            yield f"{width} {'dark' if dark else 'light'}"


def is_fine(page, look=""):
    assert not page.scrolls_sideways(), look
    inner = "return [...document.querySelectorAll('.results')].some((each) => "
    assert not page.run(f"{inner}each.scrollWidth > each.clientWidth)"), look
    assert page.run(FAINT, "#content") == [], look
    assert page.complaints() == [], look


NEWEST = "billing.Invoice pk=42; the newest grant is that of web-3, pid 812, thread MainThread"


def event(name, kind="rejected", times=1, note=NEWEST):
    holder = "task billing.charge[0714a454-1c2e-4f7e-9a51-0123456789ab] on web-3, pid 812"
    facts = {"alias": "default", "happened_at": timezone.now(), "token": 1_234_567}
    LockEvent.objects.create(name=name, kind=kind, holder=holder, note=note, times=times, **facts)


# Forced release

LONG = "invoice:" + "4711-" * 12


def tab_to(page, selector):
    for _ in range(60):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        if page.run("return document.activeElement.matches(arguments[0])", selector):
            return page.driver.switch_to.active_element
    raise AssertionError(f"The tabulator doesn't lead to {selector}.")


def choose_action(page):
    page.one('select[name="action"] option[value="release_by_force"]').click()
    page.one('button[name="index"]').click()
    page.wait(lambda page: page.all(".fencedlock-locks"), "no question")


def message(page):
    return page.wait(lambda page: page.all("ul.messagelist li"), "no message")[0]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_permits_and_readers(page, holders, width, dark):
    permit = holders.permit(LONG, 10, 1000)
    reader = holders.acquire(lock(LONG, shared=True))
    holders.acquire(lock(LONG, shared=True))
    page.show(width=width, dark=dark)
    page.open()
    is_fine(page)
    for lease in (permit, reader):
        row = HeldLock.objects.get(owner=lease.owner_id)
        page.open(f"heldlock/{row.pk}/change/")
        is_fine(page)
    page.driver.find_element("partial link text", "RELEASE ALL READERS").click()
    is_fine(page)
    page.one('button[value="release"]').click()
    assert "Further readers that lost it: 1." in message(page).text
    assert permit.verify()
    assert not reader.verify()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_a_forced_release_by_mouse_from_the_list(page, width, dark):
    lease, other = lock(LONG).acquire(), lock("nightly").acquire()
    page.show(width=width, dark=dark)
    page.open()
    is_fine(page)
    box_of(page, LONG).click()
    choose_action(page)
    assert LONG in page.one(".fencedlock-locks").text
    assert "nightly" not in page.one("#content").text
    is_fine(page)
    page.one('button[value="release"]').click()
    assert "was released by force" in message(page).text
    assert not page.scrolls_sideways()
    assert not lease.verify()
    assert other.verify()


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (400, False)])
def test_a_forced_release_by_keys_from_the_locks_page(page, width, dark):
    lease = lock("nightly", fenced=False).acquire()
    page.show(width=width, dark=dark)
    page.open(f"heldlock/{HeldLock.objects.get().pk}/change/")
    tab_to(page, "a.fencedlock-release").send_keys(Keys.ENTER)
    page.wait(lambda page: page.all(".fencedlock-locks"), "no question")
    assert "isn't fenced" in page.one(".fencedlock-locks").text
    is_fine(page)
    button = tab_to(page, 'button[value="release"]')
    assert page.run("return getComputedStyle(document.activeElement).outlineStyle") != "none"
    tab_to(page, "a.cancel-link").send_keys(Keys.ENTER)
    page.wait(lambda page: page.all("#result_list"), "not taken back")
    assert lease.verify()
    page.driver.back()
    page.wait(lambda page: page.all(".fencedlock-locks"), "no question")
    button = tab_to(page, 'button[value="release"]')
    button.send_keys(Keys.ENTER)
    assert "was released by force" in message(page).text
    assert not lease.verify()


# Two users and one row


@pytest.fixture
def ben(page, live_server, client):
    """Save the row's form in another tab, as another user."""
    user = Client()
    user.force_login(User.objects.create_superuser("ben"))

    def save(row, text):
        tab = page.driver.current_window_handle
        page.driver.switch_to.new_window("tab")
        page.log_in(user, live_server.url)
        page.get(f"{live_server.url}/admin/tests/document/{row.pk}/change/")
        page.one("#id_text").clear()
        page.one("#id_text").send_keys(text, Keys.ENTER)
        page.wait(lambda page: page.all("ul.messagelist .success"), "not saved")
        page.driver.close()
        page.driver.switch_to.window(tab)
        page.log_in(client, live_server.url)

    return save


@pytest.mark.urls("tests.test_versioned_admin")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_two_users_change_one_row(page, live_server, ben, width, dark):
    row = Document.objects.create(text="draft")
    address = f"{live_server.url}/admin/tests/document/"
    page.show(width=width, dark=dark)

    def wait_for(text):
        # Elements of a page that is left meanwhile would be stale.
        shown = "return document.body.innerText.includes(arguments[0])"
        page.wait(lambda page: page.run(shown, text), text)

    def rejected(button, text):
        page.one(button).click()
        wait_for(text)
        assert not page.scrolls_sideways()
        assert page.run(FAINT, "#content") == []

    page.get(f"{address}{row.pk}/change/")
    page.one("#id_text").send_keys(" by anna")
    ben(row, "by ben")
    rejected("[name=_save]", "was changed since you opened this form")
    assert page.one("#id_text").get_attribute("value") == "draft by anna"
    page.get(f"{address}{row.pk}/delete/")
    ben(row, "by ben again")
    rejected("#content [type=submit]", "was changed since this page showed it")
    page.get(address)
    page.one("#id_form-0-text").send_keys(" and anna")
    ben(row, "by ben")
    rejected("[name=_save]", "was changed since you opened this form")
    for question in (False, True):
        page.get(address)
        page.one(".action-select").click()
        page.one('select[name="action"] option[value="delete_selected"]').click()
        if question:
            page.one('button[name="index"]').click()
            wait_for("Are you sure")
        ben(row, f"by ben, {question}")
        button = "#content [type=submit]" if question else 'button[name="index"]'
        rejected(button, "was changed since this page showed it")
    assert Document.objects.get().text == "by ben, True"
    assert page.complaints() == []
