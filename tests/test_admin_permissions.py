"""Every address of the admin's pages of locks: who gets there, and who doesn't."""

import json
import re

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.utils import timezone

from django_fencedlock import lock
from django_fencedlock.models import Fence, HeldLock, LockEvent

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "secret:42"
MODELS = {"heldlock": HeldLock, "fence": Fence, "lockevent": LockEvent}
#: What whoever may view rows gets.
LOOKS = ("changelist", "history", "change")


def addresses():
    """All that the admin has of our models: the model, what it is, and the address."""
    for model, page in admin.site._registry.items():
        if model._meta.app_label != "django_fencedlock":
            continue
        base = f"/admin/django_fencedlock/{model._meta.model_name}/"
        for each in page.get_urls():
            view = each.name.rpartition("_")[2] if each.name else "redirect"
            yield model._meta.model_name, view, base + str(each.pattern)


ADDRESSES = [pytest.param(*each, id=f"{each[0]}-{each[1]}") for each in addresses()]
every_address = pytest.mark.parametrize(("model", "view", "address"), ADDRESSES)


@pytest.fixture(autouse=True)
def held():
    event = {"kind": "refused", "holder": NAME, "times": 1, "happened_at": timezone.now()}
    LockEvent.objects.create(id=1, name=NAME, **event)
    with lock(NAME) as lease:
        yield lease
        # Whatever was tried.
        lease.renew()
        assert HeldLock.objects.get().owner == lease.owner
        assert Fence.objects.get().token == lease.token


def answers(client, model, address):
    path = address.replace("<path:object_id>", "1" if model == "lockevent" else "secret_3A42")
    yield client.get(path, {"name": NAME})
    yield client.post(path, {"post": "yes", "name": NAME, "step": "release"})


def log_in(client, *codenames):
    user = User.objects.create_user("staff", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client.force_login(user)


def test_all_pages_are_known():
    known = {"changelist", "add", "history", "delete", "change", "redirect"}
    assert {(each.values[0], each.values[1]) for each in ADDRESSES} == {
        ("heldlock", "release"),
        *((model, view) for model in MODELS for view in known),
    }


@every_address
def test_nobody_gets_there(client, model, view, address):
    for answer in answers(client, model, address):
        assert answer.status_code == 302
        assert answer.url.startswith("/admin/login/")


@every_address
def test_nor_does_staff_without_permission(client, model, view, address):
    # Others' permissions are of no use.
    log_in(client, "view_user", "release_heldlock", "add_heldlock", "delete_fence")
    for answer in answers(client, model, address):
        if view == "redirect":
            # To the page of the row, whether there is one or not.
            assert (answer.status_code, answer.url.rpartition("/change/")[1]) == (302, "/change/")
        else:
            assert answer.status_code == 403
            assert NAME not in answer.content.decode()


@every_address
def test_who_may_view_sees_and_does_nothing(client, model, view, address):
    log_in(client, f"view_{model}")
    looked, tried = answers(client, model, address)
    if view == "redirect":
        assert looked.status_code == 302
        return
    assert looked.status_code == (200 if view in LOOKS else 403)
    assert tried.status_code in ((200, 302, 403) if view in LOOKS else (403,))


@pytest.mark.parametrize("model", MODELS)
def test_the_index_names_what_may_be_viewed(client, model):
    log_in(client, f"view_{model}")
    html = client.get("/admin/").content.decode()
    assert {each for each in MODELS if f"/django_fencedlock/{each}/" in html} == {model}


@pytest.mark.parametrize("view_events", [True, False])
def test_links_lead_where_one_may_go(client, view_events):
    log_in(client, "view_heldlock", *(["view_lockevent"] if view_events else []))
    for path in ("", "secret_3A42/change/"):
        html = client.get(f"/admin/django_fencedlock/heldlock/{path}").content.decode()
        assert ("/admin/django_fencedlock/lockevent/?" in html) == view_events
        assert re.search(r'class="fencedlock-refused"[^>]*>1<', html)


RELEASE = "/admin/django_fencedlock/heldlock/release/"


@pytest.fixture
def releaser():
    client = Client(enforce_csrf_checks=True)
    log_in(client, "view_heldlock", "release_heldlock")
    return client


def test_another_sites_form_releases_nothing(releaser, held):
    mark = json.dumps([NAME, "default", held.owner, ""])
    for step in ("release", "ask_again", "end_session"):
        assert releaser.post(RELEASE, {"lock": mark, "step": step}).status_code == 403


def test_nor_does_an_address(releaser, held):
    mark = json.dumps([NAME, "default", held.owner, ""])
    asked = releaser.get(RELEASE, {"name": NAME, "lock": mark, "step": "release", "post": "yes"})
    assert asked.status_code == 200
    for method in (releaser.head, releaser.options, releaser.put, releaser.delete, releaser.patch):
        assert method(f"{RELEASE}?step=release&name={NAME}").status_code in (200, 403, 405)


def test_the_page_that_asks_is_shown_within_no_other(releaser):
    assert releaser.get(RELEASE, {"name": NAME}).headers["X-Frame-Options"] == "DENY"


@pytest.mark.parametrize("key", ["next", "_to", "_popup", "_changelist_filters", "database"])
def test_nothing_leads_to_another_site(client, key):
    log_in(client, "view_heldlock", "release_heldlock")
    away = {key: "//evil.example/"}
    for answer in (
        client.get("/admin/django_fencedlock/heldlock/", away),
        client.get("/admin/django_fencedlock/heldlock/secret_3A42/change/", away),
        client.get(RELEASE, {**away, "name": "nobody's"}),
        client.post(f"{RELEASE}?{key}=//evil.example/", {**away, "step": "release"}),
    ):
        assert not answer.headers.get("Location", "/").startswith(("//", "http"))
        assert 'href="//evil' not in answer.content.decode()
