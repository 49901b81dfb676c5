"""The system checks of settings, models, tables, tasks and lock services."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.core.checks import CheckMessage, Info, Tags, Warning, register
from django.core.checks import Error as CheckError
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections, router
from django.db.models import Model

from . import conf
from .core.manager import service
from .models import FencedModel, VersionedModel, checks
from .problems import Level, Problem

APP = "django_fencedlock"


@register(Tags.compatibility)
def check_settings(**kwargs: Any) -> list[CheckMessage]:
    return messages(_settings_problems())


# With `check --database ALIAS`.
@register(Tags.database)
def check_services(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    if not databases or any(problem.is_error for problem in conf.problems()):
        return []
    fences = {alias: conf.config(alias).fence_database for alias in conf.aliases()}
    asked = [alias for alias, database in fences.items() if database in databases]
    found = [problem for alias in asked for problem in service(alias).backend.check()]
    # `migrate` runs this check too, before it makes the tables.
    if sys.argv[1:2] != ["migrate"]:
        for database in sorted({fences[alias] for alias in asked}):
            # The check of the service, or of another one, reports a database that is unavailable.
            with contextlib.suppress(Error):
                found += _table_problems(database)
    return messages(found)


@register(Tags.models)
def check_models(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    configs = apps.get_app_configs() if app_configs is None else app_configs
    models = [model for config in configs for model in config.get_models()]
    return messages(checks.model_problems(models))


# With `check --database ALIAS`.
@register(Tags.database)
def check_tables(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    return messages(checks.table_problems(databases or ()))


@register(Tags.compatibility)
def check_tasks(**kwargs: Any) -> list[CheckMessage]:
    return messages(_task_problems())


# Before checks run, django.contrib.admin has imported the admin modules of all apps.
@register(Tags.admin)
def check_admin(**kwargs: Any) -> list[CheckMessage]:
    return messages(_admin_problems())


def problems() -> list[Problem]:
    """Return the problems of settings, models and tasks, without asking a server."""
    models = checks.model_problems(apps.get_models())
    return [*_settings_problems(), *models, *_task_problems(), *_admin_problems()]


def _settings_problems() -> Iterator[Problem]:
    yield from conf.problems()
    # Rows are written on private connections, which query caches don't notice.
    remedies = {
        "cachalot": f"Add {APP!r} to CACHALOT_UNCACHABLE_APPS." if _cachalot() else "",
        "cacheops": f"Add '{APP}.*': None to CACHEOPS." if _cacheops() else "",
    }
    for name, remedy in remedies.items():
        if remedy and apps.is_installed(name):
            yield Problem(
                "W004",
                f"django-{name} caches the tables of {APP}: the admin and `manage.py fencedlock` "
                "show locks that were released, and miss new ones. Locks and fences still work.",
                remedy,
            )


def _table_problems(database: str) -> list[Problem]:
    """Return a problem if tables of this package lack columns: a migration wasn't applied."""
    introspection, lacking = connections[database].introspection, []
    models = list(apps.get_app_config(APP).get_models())
    with connections[database].cursor() as cursor:
        present = introspection.table_names(cursor)
        for model in models:
            table, columns = model._meta.db_table, set[str]()
            if table in present:
                described = introspection.get_table_description(cursor, table)
                columns = {column.name for column in described}
            if not columns.issuperset(field.column for field in model._meta.local_concrete_fields):
                lacking.append(table.removeprefix(f"{APP}_"))
    if not lacking:
        return []
    names = ", ".join(lacking)
    what = f"Tables of {APP} in database {database!r} are missing or outdated: {names}."
    remedy = f"Run: manage.py migrate {APP} --database {database}"
    if not all(router.allow_migrate_model(database, model) for model in models):
        allow = f"allow_migrate() of DATABASE_ROUTERS keeps them out. Allow {APP} in {database!r}"
        remedy = f"{allow}, then run: manage.py migrate {APP} --database {database}"
    return [Problem("W009", what, remedy)]


def _task_problems() -> list[Problem]:
    celery_apps = _celery_apps()
    # Without such a task, the decorator isn't imported either.
    if f"{__package__}.celery" not in sys.modules:
        return []
    from .celery import checks as task_checks

    return list(task_checks.problems(celery_apps))


def _celery_apps() -> list[Any]:
    """Return the Celery apps of this process, with their tasks imported."""
    if "celery.app.base" not in sys.modules:
        return []
    from celery import _state

    state: Any = _state
    found = list(state._get_active_apps())
    for app in found:
        _import_tasks(app)
    # Celery makes an app without settings in a thread that has none.
    chosen = [app for app in found if app.set_as_current or app.main != "default"]
    return chosen or found


def _import_tasks(app: Any) -> None:
    before = os.environ.get("CELERY_SKIP_CHECKS", "")
    # Otherwise Celery runs Django's checks, including these, when it imports tasks.
    os.environ["CELERY_SKIP_CHECKS"] = "true"
    # Not every process can import all tasks. A worker reports the error.
    with contextlib.suppress(Exception):
        app.loader.import_default_modules()
    # Celery skips no checks if it is empty.
    os.environ["CELERY_SKIP_CHECKS"] = before


def _cachalot() -> bool:
    only = _setting("CACHALOT_ONLY_CACHABLE_APPS", ())
    included = APP in only if only else not _setting("CACHALOT_ONLY_CACHABLE_TABLES", ())
    excluded = APP in _setting("CACHALOT_UNCACHABLE_APPS", ())
    return bool(_setting("CACHALOT_ENABLED", True) and included and not excluded)


def _cacheops() -> bool:
    profiles = _setting("CACHEOPS", {})
    profile = profiles.get(f"{APP}.*", profiles.get("*.*"))
    cached = profile is not None and {**_setting("CACHEOPS_DEFAULTS", {}), **profile}.get("ops")
    return bool(_setting("CACHEOPS_ENABLED", True) and cached)


def _setting(name: str, default: Any) -> Any:
    return getattr(settings, name, default)


def _admin_problems() -> Iterator[Problem]:
    """Check the admin pages of fenced and versioned models, on every site."""
    is_invalid = any(each.is_error for each in conf.problems())
    if is_invalid or not apps.is_installed("django.contrib.admin"):
        return
    from django.contrib.admin import sites

    for site in sorted(sites.all_sites, key=lambda site: site.name):
        for model in filter(site.is_registered, apps.get_models()):
            page = site.get_model_admin(model)
            about = f"{type(page).__name__} (site {site.name!r})"
            yield from _page_problems(page, page, about)
            for each in inlines_of(page):
                inline = each(model, site)
                yield from _page_problems(page, inline, f"{each.__name__} in {about}")


def inlines_of(page: Any) -> list[Any]:
    """Return the inlines of an admin page, without those whose mistakes Django's checks report."""
    from django.contrib.admin.options import InlineModelAdmin

    given = page.inlines if isinstance(page.inlines, list | tuple) else ()
    inlines = [x for x in given if isinstance(x, type) and issubclass(x, InlineModelAdmin)]
    return [x for x in inlines if isinstance(x.model, type) and issubclass(x.model, Model)]


def _page_problems(page: Any, rows: Any, about: str) -> Iterator[Problem]:
    """Check a page, or one of its inlines, by what it does to its rows."""
    label, fencing = rows.model._meta.label, _fencing(rows.model)
    # An attribute, as the admin can't be imported here.
    compares = getattr(page, "compares_rows", False)
    policy = "allow" if fencing is None else fencing.spec.without_lock
    changes = _may(rows, "change") or _may(rows, "delete")
    # A new row that is named by its own primary key needs no lock.
    adds = fencing is not None and not fencing.is_of_own_pk and _may(rows, "add")
    if not changes and not adds:
        return
    register = f"Register {page.model._meta.label} with a subclass of django_fencedlock.admin."
    if policy != "allow" and not (compares and _have_one_lock(_fencing(page.model), fencing)):
        result = "fails with LockRequired" if policy == "reject" else "goes without the lock"
        yield Problem(
            "W041",
            f"{about} acquires no lock of {label}: saving or deleting {result}.",
            f"{register}FencedModelAdmin."
            if rows is page
            else f"Give {label} the lock of its parent row, under a FencedModelAdmin. Or make the "
            "inline read-only.",
        )
    elif changes and issubclass(rows.model, VersionedModel) and not compares:
        yield Problem(
            "W042",
            f"{about} compares no versions: of two users who edit a {label}, the second one "
            "overwrites what the first one saved.",
            f"{register}VersionedModelAdmin.",
        )


def _fencing(model: Any) -> Any:
    """Return how a model is fenced; None if it isn't, or if other checks report a mistake."""
    with contextlib.suppress(AttributeError, ImproperlyConfigured, ValueError):
        if issubclass(model, FencedModel) and model.fencing.spec:
            return model.fencing
    return None


def _have_one_lock(parent: Any, inline: Any) -> bool:
    """Whether the rows of an inline have the lock of their parent, as far as templates say."""
    if parent is None or None in (parent.columns, inline.columns):
        return parent is not None
    parts = [[(part.text, part.form) for part in each.parts] for each in (parent, inline)]
    return parts[0] == parts[1]


def _may(rows: Any, what: str) -> bool:
    """Whether users may add, change or delete rows. If it depends on the request, they may."""
    is_inline = hasattr(rows, "max_num")
    if what == "add" and is_inline and rows.max_num == 0:
        return False
    try:
        return bool(getattr(rows, f"has_{what}_permission")(*[None] * (1 + is_inline)))
    except Exception:
        return True


def messages(problems: Iterable[Problem], obj: Any = None) -> list[CheckMessage]:
    """Return the problems as Django's system checks report them."""
    kinds = {Level.ERROR: CheckError, Level.WARNING: Warning, Level.NOTE: Info}
    return [
        kinds[each.level](each.message, each.hint or None, obj, f"{APP}.{each.id}")
        for each in problems
        if each.level is not Level.OK
    ]
