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

    kinds = {"add", "change", "delete"} - {but}
    return type(base.__name__, (base,), {f"has_{each}_permission": never for each in kinds})


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


def no_lock(who: str, label: str, result: str = "fails with LockRequired") -> str:
    hint = f"Register {label} with a subclass of django_fencedlock.admin.FencedModelAdmin."
    if "Rows in" in who:
        hint = (
            f"Give {label} the lock of its parent row, under a FencedModelAdmin. Or make the "
            "inline read-only."
        )
    text = f"acquires no lock of {label}: saving or deleting {result}."
    return f"W041 {who} (site 'staff') {text} {hint}"


def no_version(who: str, label: str, page: str) -> str:
    return (
        f"W042 {who} (site 'staff') compares no versions: of two users who edit a {label}, the "
        f"second one overwrites what the first one saved. Register {page} with a subclass of "
        "django_fencedlock.admin.VersionedModelAdmin."
    )


PROTECTS_NOTHING = (
    "E041 Page protects nothing: tests.Account is neither a FencedModel nor a VersionedModel. "
    "Derive Account from one of them, or Page from ModelAdmin."
)
EDITABLE = (
    "E040 Page.list_editable saves many rows at once, but each row has its own lock. Remove "
    "list_editable. Users can change each row on its own page."
)
WRITES = "goes without the lock"
LISTED = {"list_display": ("pk", "amount"), "list_editable": ("amount",)}


@pytest.mark.parametrize(
    ("model", "base", "message"),
    [
        (Invoice, PLAIN, no_lock("ModelAdmin", "tests.Invoice")),
        (Contract, read_only(PLAIN, but="delete"), no_lock("ModelAdmin", "tests.Contract")),
        (Warned, PLAIN, no_lock("ModelAdmin", "tests.Warned", WRITES)),
        (Document, PLAIN, no_version("ModelAdmin", "tests.Document", "tests.Document")),
        (Account, page(PLAIN, inline(LedgerLine)), no_lock("Rows in Page", "tests.LedgerLine")),
        (
            Account,
            page(PLAIN, read_only(inline(LedgerLine), but="add")),
            no_lock("Rows in Page", "tests.LedgerLine"),
        ),
        (LedgerLine, read_only(PLAIN, but="add"), no_lock("ModelAdmin", "tests.LedgerLine")),
        (
            Account,
            page(FencedModelAdmin, inline(Invoice, admin.StackedInline)),
            no_lock("Rows in Page", "tests.Invoice"),
        ),
        (
            Contract,
            page(read_only(PLAIN), inline(Clause)),
            no_version("Rows in Page", "tests.Clause", "tests.Contract"),
        ),
        (Account, page(FencedModelAdmin), PROTECTS_NOTHING),
        (Invoice, page(FencedModelAdmin, **LISTED), EDITABLE),
    ],
)
def test_what_is_reported(model: Any, base: Any, message: str) -> None:
    assert found(model, base) == [message]


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
        (Account, page(PLAIN, read_only(inline(LedgerLine, max_num=0), but="add"))),
        (Account, page(PLAIN, read_only(inline(Invoice), but="add"))),
        (Shelf, page(PLAIN, "a mistake that Django reports")),
    ],
)
def test_what_is_not_reported(model: Any, base: Any) -> None:
    assert [each for each in found(model, base) if re.match("[EW]04", each)] == []


@pytest.mark.parametrize("base", [PLAIN, FencedModelAdmin])
@pytest.mark.parametrize(
    ("inlines", "of_django"),
    [
        (None, "E103"),
        ({inline(Rebate)}, "E103"),
        (["x"], "E104"),
        ([page(PLAIN)], "E104"),
        ([type("Rows", (admin.TabularInline,), {})], "E105"),
        ([inline("tests.Rebate")], "E106"),
    ],
)
def test_a_mistake_in_inlines_is_left_to_the_checks_of_django(
    base: Any, inlines: Any, of_django: str
) -> None:
    ids = {each.split()[0] for each in found(Invoice, type("Page", (base,), {"inlines": inlines}))}
    assert ids == {of_django, *(["W041"] if base is PLAIN else [])}


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
