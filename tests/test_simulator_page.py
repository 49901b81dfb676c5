"""The simulator's page in a real browser, and its access control."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.http import HttpResponse
from django.test import RequestFactory, override_settings
from selenium.webdriver import ActionChains, Keys

from example_project.simulator.views import for_this_machine
from tests.scripts import ROOT
from tests.scripts import environment as variables
from tests.servers.process import _alive, free_port, wait_until
from tests.visitor import Visitor

pytestmark = pytest.mark.slow


CONTRAST = (ROOT / "tests/contrast.js").read_text()


def run_site(*options, **environment):
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "django", "runserver", *options, str(port)],
        cwd=ROOT,
        env=variables(DJANGO_SETTINGS_MODULE="tests.simulator_site", **environment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    origin = f"http://127.0.0.1:{port}/"
    url = f"{origin}simulator/"
    wait_until(lambda: _answers(url), "the site to answer")
    return SimpleNamespace(process=process, origin=origin, url=url)


def _answers(url):
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def site(redis_server):
    found = run_site("--noreload", EXAMPLE_REDIS_URL=redis_server.url)
    yield found
    found.process.terminate()
    found.process.wait(20)


@pytest.fixture
def page(browser, site):
    def opened(**switches):
        query = "&".join(f"{key}={value}" for key, value in ({"ttl": "5"} | switches).items())
        browser.get(f"{site.url}?{query}")
        browser.wait(lambda page: page.one("#step").get_attribute("aria-disabled"), "the state")
        return browser

    return opened


def assert_readable(page):
    for dark in (False, True):
        for width in (1280, 400):
            page.show(width=width, dark=dark)
            assert not page.scrolls_sideways()
            assert page.run(CONTRAST) == []


def reading(page):
    return page.one("#reading").text


def is_over(page):
    return page.one("#next").text == "The scenario is over."


def test_a_scenario_is_played(page, site):
    played = page(scenario="pause")
    assert "Press Play" in reading(played)
    played.one("#play").click()
    played.wait(is_over, "the scenario to end")
    assert "counter is 3: right" in reading(played)
    assert played.one("#score-rejected").text == "1"
    assert played.one("#score-highest").text == "3"
    assert len(played.all("#timeline .refused")) == 1
    assert len(played.all("#timeline circle.wrote")) == 3
    assert len(played.all("#timeline .over")) == 1
    log = [item.text for item in played.all("#log span")]
    assert any("is rejected, StaleFence: token 2 has been granted since" in line for line in log)
    assert played.complaints() == []
    loaded = played.run("return performance.getEntriesByType('resource').map(each => each.name)")
    assert loaded
    assert [name for name in loaded if not name.startswith(site.origin)] == []
    assert_readable(played)


def test_a_scenario_is_stepped_through_by_keyboard_alone(page):
    stepped = page(scenario="unfenced")
    steps = len(stepped.all("#steps li"))
    stepped.run("document.body.focus()")
    for _ in range(20):
        ActionChains(stepped.driver).send_keys(Keys.TAB).perform()
        if stepped.run("return document.activeElement.id") == "step":
            break
    for done in range(1, steps + 1):
        ActionChains(stepped.driver).send_keys(Keys.ENTER).perform()
        stepped.wait(lambda page, done=done: len(page.all("#steps li.done")) == done)
        assert stepped.run("return document.activeElement.id") == "step"
        stepped.wait(lambda page: is_over(page) or page.one("#next").text.startswith("Next"))
    assert "counter is 2: wrong" in reading(stepped)
    assert len(stepped.all("#timeline .stale")) == 1
    assert stepped.one("#score-lost").text == "2"
    assert stepped.complaints() == []


def test_the_address_selects_a_scenario(page):
    linked = page(scenario="cut", backend="redis", fencing="off", ttl="5")
    chosen = {name: linked.one(f"#{name}").get_attribute("value") for name in ("backend", "ttl")}
    assert chosen == {"backend": "redis", "ttl": "5"}
    linked.run(
        "const e = document.querySelector('#scenario'); e.value = 'queue';"
        "e.dispatchEvent(new Event('change', {bubbles: true}));"
    )
    linked.wait(lambda page: len(page.all("#steps li")) == 15)
    assert "scenario=queue" in linked.driver.current_url
    assert "backend=database" in linked.driver.current_url
    odd = page(scenario="nonsense")
    assert "scenario is 'nonsense'" in odd.one("#trouble").text
    assert_readable(odd)
    impossible = page(scenario="cut", backend="database")
    assert "no network between" in impossible.one("#obstacle").text
    assert impossible.one("#play").get_attribute("aria-disabled") == "true"
    assert_readable(impossible)
    assert linked.complaints() == []


def test_clients_are_controlled_by_hand(page):
    played = page(scenario="free", backend="redis")

    def press(name, action):
        played.one(f'[data-client="{name}"] [data-action="{action}"]').click()

    def says(words):
        played.wait(lambda page: words in page.one("#log").text, words)

    press("A", "acquire")
    says("A has the lock, with token 1")
    press("B", "acquire")
    says("B waits: A has the lock")
    press("A", "cut")
    says("A can't reach the lock service")
    says("B has the lock, with token 2, while A still considers itself the holder")
    press("A", "write")
    says("A's write with token 1 is rejected")
    assert_readable(played)
    press("B", "pause")
    played.wait(lambda page: page.one('[data-client="B"] [data-action="wake"]').is_displayed())
    press("B", "wake")
    says("B continues")
    press("B", "kill")
    says("B is dead")
    assert played.one("#score-accepted").text == "0"
    assert played.complaints() == []


def test_leaving_the_page_ends_its_processes(page, site):
    left = page(scenario="free")
    left.one('[data-client="A"] [data-action="acquire"]').click()
    left.wait(lambda page: "A has the lock" in page.one("#log").text)
    assert len(_referees_of(site)) == 1
    left.get("about:blank")
    wait_until(lambda: not _referees_of(site), "the processes of the page to end")


def test_no_process_outlives_the_site():
    site = run_site()  # with its reloader process
    try:
        visitor = Visitor(site.url)
        visitor.post("start/", scenario="free")
        visitor.post("act/", client="A", action="acquire")
        wait_until(lambda: client(visitor, "A")["holds"], "A to have the lock")
        visitor.post("act/", client="A", action="pause")
        pids = [client(visitor, "A")["pid"], *_referees_of(site)]
        assert len(pids) == 2
    finally:
        os.killpg(site.process.pid, signal.SIGKILL)
        site.process.wait(20)
    wait_until(lambda: not _alive(pids), "the processes to end")


def client(visitor, name):
    clients = visitor.get_json("events/")["clients"]
    return next(each for each in clients if each["name"] == name)


def _referees_of(site):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            if b"example_project.simulator.referee" in words:
                parent = int(words[words.index(b"example_project.simulator.referee") + 1])
                if os.getpgid(parent) == site.process.pid:
                    found.append(int(path.parent.name))
        except OSError:
            continue
    return found


# Who may


def asked(**meta):
    request = RequestFactory().get("/", **meta)
    if user := meta.get("user"):
        request.user = user
    return for_this_machine(lambda request: HttpResponse("in"))(request)


def test_only_this_machine_is_answered():
    staff = SimpleNamespace(is_active=True, is_staff=True)
    visitor = SimpleNamespace(is_active=True, is_staff=False)
    with override_settings(DEBUG=True):
        assert asked(REMOTE_ADDR="127.0.0.1").status_code == 200
        assert asked(REMOTE_ADDR="::1").status_code == 200
        assert asked(REMOTE_ADDR="10.0.0.7").status_code == 403
        assert asked(REMOTE_ADDR="").status_code == 403
        assert asked(REMOTE_ADDR="127.0.0.1", HTTP_X_FORWARDED_FOR="8.8.8.8").status_code == 403
    with override_settings(DEBUG=False):
        assert asked(REMOTE_ADDR="127.0.0.1").status_code == 403
        assert asked(REMOTE_ADDR="127.0.0.1", user=visitor).status_code == 403
        assert asked(REMOTE_ADDR="127.0.0.1", user=staff).status_code == 200
        assert asked(REMOTE_ADDR="10.0.0.7", user=staff).status_code == 403


def test_a_post_needs_the_pages_token(site):
    visitor = Visitor(site.url)
    assert "run" in visitor.post("start/", scenario="free")
    for path in ("start/", "script/", "act/"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            visitor.post_without_token(path, do="play")
        assert caught.value.code == 403
        caught.value.close()
