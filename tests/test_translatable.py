"""All texts of the admin can be translated."""

import ast
import html
import re
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone, translation

import django_fencedlock
from django_fencedlock import LeaseLost, exceptions, lock
from django_fencedlock.admin import FenceAdmin, HeldLockAdmin, LockEventAdmin, locks
from django_fencedlock.admin.base import translated
from django_fencedlock.admin.kinds import KINDS
from django_fencedlock.admin.locks import STATES
from django_fencedlock.models import Fence, HeldLock, LockEvent
from tests.models import Document
from tests.test_fenced_admin import opened, url

pytestmark = pytest.mark.django_db(transaction=True)

PACKAGE = Path(django_fencedlock.__file__).parent
BEGIN, END = "\N{LEFT WHITE SQUARE BRACKET}", "\N{RIGHT WHITE SQUARE BRACKET}"
WORD = r"[^\W\d_]{2,}"
#: Data of processes, aliases and backends, a unit, and one text of Django's own: not translated.
DATA = {"pid", "thread", "MainThread", "default", "database", "admin", "min", "True", "permit"}
DATA |= set(re.findall(WORD, socket.gethostname()))
LIST = "/admin/django_fencedlock/heldlock/"


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    def mark(text: str) -> str:
        return f"{BEGIN}{text}{END}"

    catalogue = translation._trans
    monkeypatch.setattr(catalogue, "gettext", mark, raising=False)
    monkeypatch.setattr(catalogue, "pgettext", lambda context, text: mark(text), raising=False)
    monkeypatch.setattr(
        catalogue, "ngettext", lambda one, many, n: mark(one if n == 1 else many), raising=False
    )


@pytest.fixture
def browser(client: Client) -> Client:
    client.force_login(User.objects.create_superuser("Q0"))
    return client


def unmarked(page: str) -> set[str]:
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    read = re.findall(r' (?:title|aria-label|placeholder|data-\w+)="([^"]*)"', page)
    read += re.split(r"<[^>]*>", page)
    inside = re.compile(f"{BEGIN}[^{BEGIN}{END}]*{END}")
    found: set[str] = set()
    for each in map(html.unescape, read):
        text = re.sub(r"\b[0-9a-f]{20,}\b", " ", each)  # an owner
        while inside.search(text):
            text = inside.sub(" ", text)
        found |= set(re.findall(WORD, text))
    return found - DATA


@pytest.fixture
def see(browser: Client, marked: None) -> Callable[..., None]:
    def look(path: str, form: dict[str, Any] | None = None) -> None:
        ask = browser.get if form is None else browser.post
        answer = ask(path, form, follow=True)
        assert answer.status_code == 200
        page = answer.content.decode()
        assert BEGIN in page
        assert unmarked(page) == set()

    return look


def test_missing_brackets_are_found(browser: Client) -> None:
    assert {"Select", "held", "lock"} <= unmarked(browser.get(LIST).content.decode())


def test_pages_of_locks(see: Callable[..., None]) -> None:
    see(LIST)
    with lock("q3", limit=2), lock("q4", shared=True):
        see(LIST)
        for row in HeldLock.objects.all():
            see(f"{LIST}{row.pk}/change/")
            see(f"{LIST}release/?name={row.name}")
        with mock.patch.object(locks, "MAX_LOCKS", 0):
            see(f"{LIST}release/?name=q4")
    with lock("q1", ttl=60), lock("q2", fenced=False):
        LockEvent.objects.create(
            name="q1", kind="rejected", happened_at=timezone.now(), times=2, token=1
        )
        see(LIST)
        see(f"{LIST}{HeldLock.objects.get(name='q1').pk}/change/")
        see(f"{LIST}release/?name=q1")
        past = timezone.now() - timedelta(days=3)
        HeldLock.objects.filter(name="q1").update(acquired_at=past, expires_at=past)
        see(LIST)
        see(f"{LIST}{HeldLock.objects.get(name='q2').pk}/change/")
        see(LIST, {"action": "release_by_force", "_selected_action": 1})
        see("/admin/django_fencedlock/fence/")
        see("/admin/django_fencedlock/fence/q1/change/")
        see("/admin/django_fencedlock/lockevent/")
        see(f"/admin/django_fencedlock/lockevent/{LockEvent.objects.get().pk}/change/")
    see("/admin/")


def test_messages_of_a_forced_release(see: Callable[..., None], browser: Client) -> None:
    with pytest.raises(LeaseLost), lock("q1"):
        page = browser.get(f"{LIST}release/?name=q1").content.decode()
        marks = [html.unescape(each) for each in re.findall(r'name="lock" value="([^"]*)"', page)]
        see(f"{LIST}release/", {"lock": marks, "step": "release"})
    see(f"{LIST}release/", {"lock": marks, "step": "release"})
    see(f"{LIST}release/?name=q1")


def test_every_reason_is_marked(marked: None) -> None:
    for kind in vars(exceptions).values():
        if isinstance(kind, type) and issubclass(kind, exceptions.FencedLockError):
            assert translated(kind("q1")).startswith(BEGIN), kind


@pytest.mark.urls("tests.test_versioned_admin")
def test_messages_about_rows_that_were_changed_are_marked(browser: Client, marked: None) -> None:
    row = Document.objects.create(text="draft")
    forms = {view: opened(browser, row, view) for view in ("change", "delete")}
    for text in (f"{BEGIN}“Document object", f"{BEGIN}The page was sent without"):
        row.save()
        for view, form in forms.items():
            answer = browser.post(url(row, view), {**form, "text": "mine"}, follow=True)
            assert text in answer.content.decode()
            form.pop("_fencedlock_seen", None)


def test_states_columns_and_models_are_marked(marked: None) -> None:
    kinds = [name for name, _rows in KINDS.values()]
    for text in (*sum(STATES.values(), ()), *kinds, *LockEvent.Kind.labels):
        assert str(text).startswith(BEGIN), text
    for model in (Fence, HeldLock, LockEvent):
        assert str(model._meta.verbose_name).startswith(BEGIN), model
        assert str(model._meta.verbose_name_plural).startswith(BEGIN), model
    for page in (HeldLockAdmin, FenceAdmin, LockEventAdmin):
        for name in page.list_display:
            column = getattr(page, name, None) or page_field(page, name)
            label = getattr(column, "short_description", None) or column.verbose_name
            assert str(label).startswith(BEGIN), (page, name)


def page_field(page: Any, name: str) -> Any:
    model = {HeldLockAdmin: HeldLock, FenceAdmin: Fence, LockEventAdmin: LockEvent}[page]
    return model._meta.get_field(name)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.html")), ids=lambda path: path.name)
def test_templates_have_no_words_of_their_own(path: Path) -> None:
    texts = r"{% blocktranslate.*?{% endblocktranslate %}"
    classes = r"{% block (?:bodyclass|coltype) %}.*?{% endblock %}"
    text = re.sub(rf"{texts}|{classes}", " ", path.read_text(), flags=re.DOTALL)
    text = re.sub(r"{%.*?%}|{{.*?}}", " ", text)
    assert unmarked(text) == set()


def test_texts_can_be_found_by_makemessages() -> None:
    """makemessages finds only constants, no f-strings."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("_", "_now", "gettext", "gettext_lazy")
        and not (node.args and isinstance(node.args[0], ast.Constant))
    ]
    assert wrong == []
