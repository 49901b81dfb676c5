import pytest
from django.contrib.auth.models import User


@pytest.fixture
def page(browser, live_server, client):
    user = User.objects.create_superuser("boss", password="x")
    client.force_login(user)
    browser.log_in(client, live_server.url)
    browser.get(f"{live_server.url}/admin/django_fencedlock/heldlock/")
    return browser


@pytest.mark.django_db(transaction=True)
def test_the_browser_shows_a_page_as_its_reader_likes_it(page, tmp_path):
    background = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(background)
    page.show(width=400, dark=True)
    assert page.run("return innerWidth") == 400
    assert page.run(background) != light
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 1000
    assert page.complaints() == []


@pytest.mark.django_db(transaction=True)
def test_a_page_may_have_no_javascript(page):
    page.run("localStorage.setItem('was', 'here')")
    page.script(False)
    page.driver.refresh()
    assert page.one("#fencedlock-refresh").get_attribute("hidden")


@pytest.mark.django_db(transaction=True)
def test_nothing_is_left_of_the_page_before(page, browser):
    browser.run("localStorage.setItem('was', 'here')")
    here = browser.driver.current_url
    browser.reset()
    browser.get(here)
    assert "login" in browser.driver.current_url
    assert browser.run("return localStorage.getItem('was')") is None


@pytest.mark.django_db(transaction=True)
def test_the_console_is_heard(page):
    page.run("console.error('a complaint')")
    assert "a complaint" in page.complaints()[0]
    assert page.complaints() == []
