"""What the admin's pages of locks show and do; `test_admin_access` has who gets there."""

import json
import re

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.utils import timezone

from django_fencedlock import lock
from django_fencedlock.models import Fence, HeldLock, LockEvent

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "secret:42"
MODELS = {"heldlock": HeldLock, "fence": Fence, "lockevent": LockEvent}


@pytest.fixture(autouse=True)
def held():
    event = {"kind": "rejected", "holder": NAME, "times": 1, "happened_at": timezone.now()}
    LockEvent.objects.create(id=1, name=NAME, **event)
    with lock(NAME) as lease:
        yield lease
        # Whatever was tried.
        lease.renew()
        assert HeldLock.objects.get().owner == lease.owner_id
        assert Fence.objects.get().token == lease.token


def log_in(client, *codenames):
    user = User.objects.create_user("staff", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client.force_login(user)


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
        assert re.search(r'class="fencedlock-rejected"[^>]*>1<', html)


RELEASE = "/admin/django_fencedlock/heldlock/release/"


@pytest.fixture
def releaser():
    client = Client(enforce_csrf_checks=True)
    log_in(client, "view_heldlock", "release_heldlock")
    return client


def test_another_sites_form_releases_nothing(releaser, held):
    mark = json.dumps([NAME, "default", held.owner_id])
    assert releaser.post(RELEASE, {"lock": mark, "step": "release"}).status_code == 403


def test_nor_does_an_address(releaser, held):
    mark = json.dumps([NAME, "default", held.owner_id])
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
