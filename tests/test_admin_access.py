"""
Who may do what at each address of the package's admin classes, in one table.

A request that isn't allowed acquires no lock, releases none, and names neither row nor holder.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.http import HttpRequest
from django.test import Client
from django.urls import path
from django.utils import timezone

from django_fencedlock import Lease, signals
from django_fencedlock.admin import FenceAdmin, FencedModelAdmin, HeldLockAdmin, LockEventAdmin
from django_fencedlock.admin.fenced import _stamp
from django_fencedlock.models import Fence, HeldLock, LockEvent
from django_fencedlock.test import hold_lock
from tests.models import Account, Invoice, LedgerLine

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls("tests.test_admin_access")]

FENCED: dict[str, Any] = {"invoice": Invoice, "ledgerline": LedgerLine}
OURS: dict[str, Any] = {"heldlock": HeldLock, "fence": Fence, "lockevent": LockEvent}
CLASSES: dict[Any, Any] = {HeldLock: HeldLockAdmin, Fence: FenceAdmin, LockEvent: LockEventAdmin}


class Narrowed:
    def get_queryset(self, request: HttpRequest) -> Any:
        return super().get_queryset(request).none()  # type: ignore[misc]


class Guarded:
    """The user has permissions on the models, and none on a single row."""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return obj is None and super().has_view_permission(request)  # type: ignore[misc]

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return obj is None and super().has_change_permission(request)  # type: ignore[misc]

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return obj is None and super().has_delete_permission(request)  # type: ignore[misc]


def site_of(name: str, *bases: type) -> admin.AdminSite:
    site = admin.AdminSite(name)
    for model in (*OURS.values(), *FENCED.values()):
        kind = CLASSES.get(model, FencedModelAdmin)
        site.register(model, type(kind.__name__, (*bases, kind), {}))
    return site


SITES = {
    "admin": site_of("admin"),
    "narrowed": site_of("narrowed", Narrowed),
    "guarded": site_of("guarded", Guarded),
}
urlpatterns = [path(f"{name}/", site.urls) for name, site in SITES.items()]


# Who asks

ALL = frozenset({"view", "add", "change", "delete", "release"})


@dataclass(frozen=True)
class Visitor:
    #: Permissions on every model; None for a visitor who isn't logged in.
    may: frozenset[str] | None
    site: str = "admin"
    has_csrf_token: bool = True


VISITORS = {
    "anonymous": Visitor(None),
    "staff without permission": Visitor(frozenset()),
    **{
        f"{verb} only": Visitor(frozenset({verb}))
        for verb in ("view", "add", "change", "delete", "release")
    },
    "view and release": Visitor(frozenset({"view", "release"})),
    "all permissions": Visitor(ALL),
    "narrowed queryset": Visitor(ALL, "narrowed"),
    "no permission on the row": Visitor(ALL, "guarded"),
    "no CSRF token": Visitor(ALL, has_csrf_token=False),
}


# What is asked for

#: In posted data: the row's key, its account, the lock that a page showed.
PK, ACCOUNT, LOCK = "<pk>", "<account>", "<lock>"
#: No visitor has it.
NONE = frozenset({"none"})
#: As everywhere in Django's admin, who may change may view.
VIEW = frozenset({"view", "change"})


@dataclass(frozen=True)
class Step:
    model: str
    view: str
    data: dict[str, str] | None
    #: The permissions of which the visitor needs one.
    needs: frozenset[str]
    #: The status for a visitor who has it.
    status: int
    #: What it does then: "locks" acquires the lock of the row, "releases" takes it away.
    effect: str = ""
    #: The permission that the effect needs as well, and the status without it.
    also: str = ""
    without: int = 403
    #: The statuses where none of the rows is in the queryset, and where the visitor has no
    #: permission on the row; None if the step needs no row.
    narrowed: int | None = 302
    guarded: int | None = 403
    #: The status without permission: a redirect that tells nothing is no refusal.
    lacking: int = 403

    def __str__(self) -> str:
        return f"{self.model}, {self.view}, {'GET' if self.data is None else 'POST'} {self.data}"

    def expected(self, visitor: Visitor) -> tuple[bool, int]:
        if visitor.may is None:
            return False, 302
        if self.data is not None and not visitor.has_csrf_token:
            return False, 403
        if self.needs.isdisjoint(visitor.may):
            return False, self.lacking
        if self.also and self.also not in visitor.may:
            return False, self.without
        status = {"narrowed": self.narrowed, "guarded": self.guarded}.get(visitor.site)
        return (True, self.status) if status is None else (False, status)


CHANGE = {"account": ACCOUNT, "amount": "5", "note": "x"}
SAVE_AS_NEW = {**CHANGE, "_saveasnew": "x"}
DELETE = {"action": "delete_selected", "_selected_action": PK}
RELEASE = {"lock": LOCK, "step": "release"}
NO_ROW: Any = {"narrowed": None, "guarded": None}


def steps() -> Iterator[Step]:
    add, change, delete = frozenset({"add"}), frozenset({"change"}), frozenset({"delete"})
    for model in FENCED:
        # A new ledger line is written under the lock of its account, a new invoice under none.
        effect = "locks" if model == "ledgerline" else ""
        yes = {"post": "yes"}
        yield Step(model, "changelist", None, VIEW, 200, **NO_ROW)
        yield Step(model, "changelist", DELETE, VIEW, 200, "", "delete", 200, 200, 200)
        yield Step(model, "changelist", DELETE | yes, VIEW, 302, "locks", "delete", 200)
        yield Step(model, "add", None, add, 200, **NO_ROW)
        yield Step(model, "add", CHANGE, add, 302, effect, **NO_ROW)
        yield Step(model, "history", None, VIEW, 200)
        yield Step(model, "history", yes, VIEW, 200)
        yield Step(model, "delete", None, delete, 200)
        yield Step(model, "delete", yes, delete, 302, "locks")
        yield Step(model, "change", None, VIEW, 200)
        yield Step(model, "change", CHANGE, change, 302, "locks")
        yield Step(model, "change", SAVE_AS_NEW, add, 302, effect, **NO_ROW)
        yield Step(model, "redirect", None, VIEW, 302, lacking=302, guarded=302)
    for model in OURS:
        yield Step(model, "changelist", None, VIEW, 200, **NO_ROW)
        if model != "heldlock":
            yield Step(model, "changelist", DELETE, VIEW, 200, **NO_ROW)
        yield Step(model, "add", None, NONE, 403)
        yield Step(model, "add", CHANGE, NONE, 403)
        yield Step(model, "history", None, VIEW, 200)
        yield Step(model, "history", {"post": "yes"}, VIEW, 200)
        yield Step(model, "delete", None, NONE, 403)
        yield Step(model, "delete", {"post": "yes"}, NONE, 403)
        yield Step(model, "change", None, VIEW, 200)
        yield Step(model, "change", CHANGE, NONE, 403)
        yield Step(model, "redirect", None, VIEW, 302, lacking=302, guarded=302)
    action = {"action": "release_by_force", "_selected_action": PK}
    asks: Any = {"model": "heldlock", "view": "release", "also": "release", "guarded": 302}
    yield Step("heldlock", "changelist", action, VIEW, 200, "", "release", 200, guarded=302)
    yield Step("heldlock", "changelist", DELETE, VIEW, 302, "", "release", 200, **NO_ROW)
    yield Step(data=None, needs=VIEW, status=200, **asks)
    yield Step(data=RELEASE, needs=VIEW, status=302, effect="releases", **asks)


STEPS = list(steps())


def test_the_table_has_every_address() -> None:
    addresses = set()
    for model, page in SITES["admin"]._registry.items():
        for each in page.get_urls():
            view = each.name.rpartition("_")[2] if each.name else "redirect"
            addresses.add((model._meta.model_name, view))
    assert {(step.model, step.view) for step in STEPS} == addresses


# What is found

#: The text of each row of a fenced model, and the name of the lock that is held.
ROW, NAME = "Contract with ACME", "secret:42"
#: A part of what is said of its holder.
HOLDER = "hold_lock"


@dataclass
class Scene:
    visitor: Visitor
    client: Client

    def answer(self, step: Step, row: Any, lease: Lease | None) -> Any:
        app = "tests" if step.model in FENCED else "django_fencedlock"
        base = f"/{self.visitor.site}/{app}/{step.model}/"
        paths = {"changelist": "", "redirect": f"{quote(row.pk)}/", "add": "add/"}
        paths["release"] = f"release/?name={NAME}"
        url = base + paths.get(step.view, f"{quote(row.pk)}/{step.view}/")
        self.client.cookies.pop("messages", None)
        if step.data is None:
            return self.client.get(url)
        owner = lease.owner_id if lease else ""
        values = {PK: row.pk, ACCOUNT: getattr(row, "account_id", ""), LOCK: owner}
        data = {key: values.get(value, value) for key, value in step.data.items()}
        # What the page of the row shows.
        stamps = {f"{row._meta.label_lower}:{row.pk}": _stamp(row)}
        data["_fencedlock_seen"] = json.dumps(stamps)
        if self.visitor.has_csrf_token:
            self.client.cookies["csrftoken"] = data["csrfmiddlewaretoken"] = "a" * 32
        return self.client.post(url, data)


@pytest.fixture(params=VISITORS)
def scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scene:
    visitor, client = VISITORS[request.param], Client(enforce_csrf_checks=True)
    user = User.objects.create_user("visitor", is_staff=True)
    if visitor.may is not None:
        names = [f"{verb}_{model}" for verb in visitor.may for model in (*FENCED, *OURS)]
        user.user_permissions.set(Permission.objects.filter(codename__in=names))
        client.force_login(user)
    for model in FENCED.values():
        monkeypatch.setattr(model, "__str__", lambda row: ROW)
    event = {"kind": "rejected", "holder": HOLDER, "times": 1, "happened_at": timezone.now()}
    LockEvent.objects.create(id=1, name=NAME, **event)
    return Scene(visitor, client)


@contextlib.contextmanager
def acquired() -> Iterator[list[str]]:
    names: list[str] = []

    def note(sender: object, name: str, **kwargs: object) -> None:
        names.append(name)

    signals.lock_acquired.connect(note)
    try:
        yield names
    finally:
        signals.lock_acquired.disconnect(note)


@pytest.mark.slow
def test_each_visitor_does_only_what_they_may(scene: Scene) -> None:
    wrong = [
        f"{step}: {fault}"
        for step in STEPS
        for fault in (faults_of_fenced if step.model in FENCED else faults_of_ours)(scene, step)
    ]
    assert not wrong, "\n".join(["", *wrong])


def faults_of_fenced(scene: Scene, step: Step) -> Iterator[str]:
    may, status = step.expected(scene.visitor)
    row, name = new_row(step.model)
    with acquired() as names:
        answer = scene.answer(step, row, None)
    yield from faults(scene, may, status, answer)
    expected = [name] if may and step.effect else []
    if names != expected:
        yield f"acquired {names}, not {expected}"
    if not may or not step.effect:
        row, name = new_row(step.model)
        with hold_lock(name):
            yield from faults(scene, may, status, scene.answer(step, row, None))


def new_row(model: str) -> tuple[Any, str]:
    account = Account.objects.create()
    row = FENCED[model](account=account)
    with row.fencing.lock() if model == "ledgerline" else contextlib.nullcontext():
        row.save()
    return row, row.fencing.name()


def faults_of_ours(scene: Scene, step: Step) -> Iterator[str]:
    may, status = step.expected(scene.visitor)
    with hold_lock(NAME) as lease:
        row = OURS[step.model].objects.get(name=NAME)
        answer = scene.answer(step, row, lease)
        yield from faults(scene, may, status, answer)
        is_held = HeldLock.objects.filter(owner=lease.owner_id).exists()
        if is_held != (not may or step.effect != "releases"):
            yield "the lock was released" if not is_held else "the lock is still held"
        assert Fence.objects.filter(token=lease.token).exists() == is_held


def faults(scene: Scene, may: bool, status: int, answer: Any) -> Iterator[str]:
    if answer.status_code != status:
        yield f"answered {answer.status_code}, not {status}"
    visitor = scene.visitor
    sees_lists = status == 200 and visitor.may and not VIEW.isdisjoint(visitor.may)
    if not may and not (sees_lists and visitor.site == "admin"):
        told = [str(each) for each in get_messages(answer.wsgi_request)]
        text = "\n".join([answer.content.decode(), answer.headers.get("Location", ""), *told])
        if found := [secret for secret in (ROW, HOLDER) if secret in text]:
            yield f"names {found}"


@pytest.mark.parametrize("model", OURS)
def test_the_index_names_what_may_be_viewed(client: Client, model: str) -> None:
    log_in(client, f"view_{model}")
    html = client.get("/admin/").content.decode()
    assert {each for each in OURS if f"/django_fencedlock/{each}/" in html} == {model}


def log_in(client: Client, *codenames: str) -> None:
    user = User.objects.create_user("staff", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client.force_login(user)
