"""The system checks of admin pages over fenced and versioned models."""

import re
from pathlib import Path
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.sites import all_sites

from django_fencedlock.admin import FencedModelAdmin, VersionedModelAdmin
from django_fencedlock.checks import check_admin
from django_fencedlock.models import Fencing
from tests.models import (
    Account,
    Called,
    Clause,
    Contract,
    Document,
    Invoice,
    LedgerLine,
    Rebate,
    Relaxed,
    Shelf,
    Warned,
)
from tests.scripts import ROOT, run_python

PLAIN = admin.ModelAdmin


def read_only(base: Any, *, but: str = "") -> Any:
    def never(page: Any, request: Any, obj: Any = None) -> bool:
        return False

    names = {f"has_{each}_permission": never for each in ("change", "delete") if each != but}
    return type("Page", (base,), names)


def inline(model: Any, base: Any = admin.TabularInline, **attributes: Any) -> Any:
    return type("Rows", (base,), {"model": model, **attributes})


def page(base: Any, *inlines: Any, **attributes: Any) -> Any:
    return type("Page", (base,), {"inlines": inlines, **attributes})


def found(model: Any, base: Any) -> list[str]:
    site = admin.AdminSite("staff")
    site.register(model, base)
    # Other test modules have sites as well.
    messages = [each for each in check_admin() if "(site 'staff')" in each.msg]
    all_sites.discard(site)
    messages += site.check(None)
    return [f"{str(each.id).rpartition('.')[2]} {each.msg} {each.hint}" for each in messages]


REGISTER = "Register {} with a subclass of django_fencedlock.admin.{}."
GIVE = (
    "Give {} the lock of its parent row, under a FencedModelAdmin. Or let the inline change and "
    "delete nothing."
)
NO_LOCK = "W041 {} (site 'staff') acquires no lock of {}: saving or deleting {}."
NO_VERSION = (
    "W042 {} (site 'staff') compares no versions: of two users who edit a {}, the second one "
    "overwrites what the first one saved."
)
FAILS = "fails with LockRequired"


@pytest.mark.parametrize(
    ("model", "base", "message", "hint"),
    [
        (
            Invoice,
            PLAIN,
            NO_LOCK.format("ModelAdmin", "tests.Invoice", FAILS),
            REGISTER.format("tests.Invoice", "FencedModelAdmin"),
        ),
        (
            Contract,
            read_only(PLAIN, but="delete"),
            NO_LOCK.format("Page", "tests.Contract", FAILS),
            REGISTER.format("tests.Contract", "FencedModelAdmin"),
        ),
        (
            Warned,
            PLAIN,
            NO_LOCK.format("ModelAdmin", "tests.Warned", "goes without the lock"),
            REGISTER.format("tests.Warned", "FencedModelAdmin"),
        ),
        (
            Document,
            PLAIN,
            NO_VERSION.format("ModelAdmin", "tests.Document"),
            REGISTER.format("tests.Document", "VersionedModelAdmin"),
        ),
        (
            Account,
            page(PLAIN, inline(LedgerLine)),
            NO_LOCK.format("Rows in Page", "tests.LedgerLine", FAILS),
            GIVE.format("tests.LedgerLine"),
        ),
        (
            Account,
            page(FencedModelAdmin, inline(Invoice, admin.StackedInline)),
            NO_LOCK.format("Rows in Page", "tests.Invoice", FAILS),
            GIVE.format("tests.Invoice"),
        ),
        (
            Contract,
            page(read_only(PLAIN), inline(Clause)),
            NO_VERSION.format("Rows in Page", "tests.Clause"),
            REGISTER.format("tests.Contract", "VersionedModelAdmin"),
        ),
        (
            Account,
            type("Page", (FencedModelAdmin,), {}),
            "E041 Page protects nothing: tests.Account is neither a FencedModel nor a "
            "VersionedModel.",
            "Derive Account from one of them, or Page from ModelAdmin.",
        ),
        (
            Invoice,
            page(FencedModelAdmin, list_display=("pk", "amount"), list_editable=("amount",)),
            "E040 Page.list_editable saves many rows at once, but each row has its own lock.",
            "Remove list_editable. Users can change each row on its own page.",
        ),
    ],
)
def test_what_is_reported(model: Any, base: Any, message: str, hint: str) -> None:
    assert found(model, base) == [f"{message} {hint}"]
    assert len(message) < 200
    assert len(hint) < 200


@pytest.mark.parametrize(
    ("model", "base"),
    [
        (Account, PLAIN),
        (Invoice, page(FencedModelAdmin, inline(Rebate))),
        (Contract, page(FencedModelAdmin, inline(Clause))),
        (Document, VersionedModelAdmin),
        (Document, page(FencedModelAdmin, list_display=("pk", "text"), list_editable=("text",))),
        (Called, VersionedModelAdmin),
        (Relaxed, PLAIN),
        (Invoice, read_only(PLAIN)),
        (Document, read_only(PLAIN)),
        (Account, page(PLAIN, read_only(inline(LedgerLine)))),
        (Shelf, page(PLAIN, "a mistake that Django reports")),
    ],
)
def test_what_is_not_reported(model: Any, base: Any) -> None:
    assert [each for each in found(model, base) if re.match("[EW]04", each)] == []


def test_a_mistake_in_the_model_is_left_to_its_own_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("a text", Fencing("{nothing}")):
        monkeypatch.setattr(Invoice, "fencing", wrong)
        assert found(Invoice, PLAIN) == []


MANAGE = """
import sys, types
from django.conf import settings
APPS = ["admin", "auth", "contenttypes", "messages", "sessions"]
settings.configure(
    INSTALLED_APPS=[*(f"django.contrib.{app}" for app in APPS if WITH_ADMIN), "shop",
                    "django_fencedlock"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[{
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "OPTIONS": {"context_processors": [
            "django.template.context_processors.request",
            "django.contrib.auth.context_processors.auth",
            "django.contrib.messages.context_processors.messages",
        ]},
    }],
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
from django.core.management import execute_from_command_line
execute_from_command_line(["manage.py", "check"])
assert ("django.contrib.admin" in sys.modules) == WITH_ADMIN
"""
ADMIN = """
from django.contrib import admin
from .models import Order
admin.site.register(Order)
"""
MODELS = """
from django_fencedlock.models import FencedModel
class Order(FencedModel):
    pass
"""


@pytest.mark.parametrize("with_admin", [True, False])
def test_manage_check_reports_a_page_that_autodiscovery_found(
    tmp_path: Path, with_admin: bool
) -> None:
    (tmp_path / "shop").mkdir()
    for name, text in {"__init__": "", "models": MODELS, "admin": ADMIN}.items():
        (tmp_path / f"shop/{name}.py").write_text(text)
    code = MANAGE.replace("WITH_ADMIN", str(with_admin))
    told = run_python(code=code, DJANGO_SETTINGS_MODULE=None, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert ("(django_fencedlock.W041) ModelAdmin (site 'admin')" in told.stderr) == with_admin
