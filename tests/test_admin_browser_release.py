"""Releasing locks by force in a real browser: by mouse and by keys, wide and narrow."""

import pytest
from django.contrib.auth.models import User
from selenium.webdriver.common.keys import Keys

from django_fencedlock import lock

pytestmark = pytest.mark.django_db(transaction=True)

LIST = "/admin/django_fencedlock/heldlock/"
LONG = "invoice:" + "4711-" * 12

#: The least contrast of a text with what it stands on, over all texts of the page's content.
CONTRAST = """
const part = c => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const light = c => 0.2126 * part(c[0]) + 0.7152 * part(c[1]) + 0.0722 * part(c[2]);
const read = text => text.match(/[\\d.]+/g).map(Number);
const ground = e => {
    const c = read(getComputedStyle(e).backgroundColor);
    return c.length < 4 || c[3] > 0 || !e.parentElement ? c : ground(e.parentElement);
};
let worst = [99, ''];
for (const e of document.querySelectorAll('#content *')) {
    const texts = [...e.childNodes].filter(n => n.nodeType === 3 && n.data.trim());
    if (!texts.length || !e.offsetParent) continue;
    const pair = [light(read(getComputedStyle(e).color)), light(ground(e))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.textContent.trim().slice(0, 40)];
}
return worst;
"""


@pytest.fixture
def page(browser, live_server, client):
    client.force_login(User.objects.create_superuser("boss", password="x"))
    browser.log_in(client, live_server.url)
    browser.home = live_server.url
    yield browser
    # Else it may be asking for the next refresh as the database is emptied.
    browser.get("about:blank")


def looks_right(page):
    assert not page.scrolls_sideways()
    ratio, text = page.run(CONTRAST)
    assert ratio >= 4.5, text
    assert page.complaints() == []


def tab_to(page, selector):
    """Press the tabulator until it is there, as somebody without a mouse does."""
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
def test_by_mouse_from_the_list(page, width, dark):
    lease, other = lock(LONG).acquire(), lock("nightly").acquire()
    page.show(width=width, dark=dark)
    page.get(page.home + LIST)
    looks_right(page)
    page.one(f'.action-select[value="{LONG}"]').click()
    choose_action(page)
    assert LONG in page.one(".fencedlock-locks").text
    assert "nightly" not in page.one("#content").text
    looks_right(page)
    page.one('button[value="release"]').click()
    assert "was released by force" in message(page).text
    assert not page.scrolls_sideways()
    assert not lease.verify()
    assert other.verify()


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (400, False)])
def test_by_keys_from_the_locks_page(page, width, dark):
    lease = lock("nightly", fenced=False).acquire()
    page.show(width=width, dark=dark)
    page.get(f"{page.home}{LIST}nightly/change/")
    tab_to(page, "a.fencedlock-release").send_keys(Keys.ENTER)
    page.wait(lambda page: page.all(".fencedlock-locks"), "no question")
    assert "isn’t fenced" in page.one(".fencedlock-locks").text  # noqa: RUF001
    looks_right(page)
    # The safe way out comes last, and nothing is chosen beforehand.
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


def test_without_javascript(page):
    lease = lock("nightly").acquire()
    page.script(False)
    page.get(page.home + LIST)
    page.one('.action-select[value="nightly"]').click()
    choose_action(page)
    page.one('button[value="release"]').click()
    assert "was released by force" in message(page).text
    assert not lease.verify()


def test_the_selection_outlives_a_refresh(page):
    one, two = lock("a").acquire(), lock("b").acquire()
    page.get(page.home + LIST)
    for name in ("a", "b"):
        page.one(f'.action-select[value="{name}"]').click()
    two.release()
    lock("c").acquire()
    pause = page.one("#fencedlock-refresh button")
    pause.click()
    pause.click()
    page.wait(lambda page: page.all('.action-select[value="c"]'), "not refreshed")
    assert page.one('.action-select[value="a"]').is_selected()
    assert not page.all('.action-select[value="b"]')
    assert "1 of 2 selected" in page.one(".actions").text
    # The new one counts as well, and is toggled with the others.
    page.one('.action-select[value="c"]').click()
    assert "2 of 2 selected" in page.one(".actions").text
    page.one("#action-toggle").click()
    assert "0 of 2 selected" in page.one(".actions").text
    page.one("#action-toggle").click()
    choose_action(page)
    assert [each.text for each in page.all(".fencedlock-locks h2")] == ["a", "c"]
    assert page.complaints() == []
    assert one.verify()
