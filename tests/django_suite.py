"""
Runs Django's own tests, their models based on `FencedModel`, and shows what that breaks.

    python -m tests.django_suite                     # all apps below, on SQLite
    python -m tests.django_suite basic queries       # these
    DJANGO_SUITE_POSTGRES=postgresql://postgres@127.0.0.1:5432/postgres \
        python -m tests.django_suite --database postgresql

It tests with the Django that is installed; the tests themselves aren't in Django's wheel, and are
taken from its sdist (``pip download``). Each app runs in two processes: as it is, which tells what
fails on this machine anyhow, and with every ``class X(models.Model)`` of its models made a
``class X(FencedModel)``, with ``FENCEDLOCK_WITHOUT_LOCK = "allow"`` and no lease. Failures of the
second alone are new. Those that any column more would cause are listed in `EXPECTED`, each with
the reason; one that isn't makes the exit status 1.

Django's tests want more than Django: ``pip install PyYAML jinja2 Pillow tblib tzdata docutils``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

HERE = Path(__file__).resolve()
#: What has to do with models. Not here: gis_tests, selenium, and apps without a model.
APPS = """
    absolute_url_overrides admin_changelist admin_checks admin_custom_urls admin_docs
    admin_filters admin_inlines admin_ordering admin_registration admin_utils admin_views
    admin_widgets aggregation aggregation_regress annotations apps async auth_tests backends base
    basic bulk_create check_framework composite_pk constraints contenttypes_tests custom_columns
    custom_lookups custom_managers custom_methods custom_migration_operations custom_pk datatypes
    dates datetimes db_functions db_typecasts db_utils defer defer_regress delete delete_regress
    distinct_on_fields empty empty_models expressions expressions_case expressions_window
    extra_regress field_deconstruction field_defaults field_subclassing file_storage
    filtered_relation fixtures fixtures_model_package fixtures_regress flatpages_tests
    force_insert_update foreign_object forms_tests from_db_value generic_inline_admin
    generic_relations generic_relations_regress generic_views get_earliest_or_latest
    get_object_or_404 get_or_create indexes inline_formsets inspectdb introspection
    invalid_models_tests known_related_objects lookup m2m_and_m2o m2m_intermediary m2m_multiple
    m2m_recursive m2m_regress m2m_signals m2m_through m2m_through_regress m2o_recursive
    managers_regress many_to_many many_to_one many_to_one_null max_lengths migrate_signals
    migration_test_data_persistence migrations migrations2 model_enums model_fields model_forms
    model_formsets model_formsets_regress model_indexes model_inheritance
    model_inheritance_regress model_meta model_options model_package model_regress model_utils
    modeladmin multiple_database mutually_referential nested_foreign_keys null_fk
    null_fk_ordering null_queries one_to_one or_lookups order_with_respect_to ordering pagination
    postgres_tests prefetch_related properties proxy_model_inheritance proxy_models queries
    queryset_pickle raw_query redirects_tests reserved_names resolve_url reverse_lookup
    save_delete_hooks schema select_for_update select_related select_related_onetoone
    select_related_regress serializers shortcuts signals sitemaps_tests sites_framework
    sites_tests str string_lookup swappable_models syndication_tests test_client
    test_client_regress test_runner test_utils timezones transaction_hooks transactions
    unmanaged_models update update_only_fields user_commands validation view_tests xor_lookups
"""

#: Models that stay as they are, as nobody could base them on it: "module.Class" -> why.
KEPT: dict[str, str] = {
    "proxy_models.models.ManagerMixin": "a base of a proxy, which may have no fields",
    "model_inheritance_regress.models.Politician": "a second concrete parent, whose fence clashes",
    "select_related_onetoone.models.Parent2": "a second concrete parent, whose fence clashes",
}

#: Failures that are no fault of the mixin: a pattern for the test's id -> why.
EXPECTED: dict[str, str] = dict.fromkeys(
    [
        r"aggregation_regress\.tests\.AggregationTests\.test_empty$",
        r"filtered_relation\.tests\.FilteredRelationTests\.test_values$",
        r"lookup\.tests\.LookupTests\.test_values_(list_)?filter_and_no_fields$",
        r"lookup\.tests\.LookupTests\.test_values_no_field_names$",
        r"or_lookups\.tests\.OrLookupsTests\.test_other_arg_queries$",
    ],
    "fails for the column too: values() has it. The message names the queryset's class",
) | {
    r"pagination\.tests\.ModelPaginationTests\.test_paginating_unordered_queryset": (
        "compares a warning that names the queryset's class"
    ),
    r"bulk_create\.tests\.BulkCreateTests\.test_bulk_insert_nullable_fields \(field=<: fence>": (
        "sets every column of the model to NULL; this one can't be set"
    ),
    r"(custom_managers\.tests\.CustomManagerTests\.test_no_objects"
    r"|managers_regress\.tests\.ManagersRegressionTests\.test_abstract_manager"
    r"|model_inheritance\.tests\.ModelInheritanceTests\.test_abstract)$": (
        "wants a model without managers, or without `objects`: the mixin has it, as any base may"
    ),
    r"model_options\.test_tablespaces\.TablespacesTests\.test_tablespace_ignored_for_": (
        "compares the CREATE TABLE of two models, but for the table's name; the CHECK's has it too"
    ),
    r"schema\.tests\.SchemaTests\.test_composed_(check_)?constraint_with_fk$": (
        "wants Meta.constraints to be empty"
    ),
    r"schema\.tests\.SchemaTests\.test_add_field_remove_field$": (
        "wants a model without constraints: PostgreSQL gets them at the end of a migration"
    ),
    r"(basic\.tests\.ModelInstanceCreationTests\.test_a?save_deprecation"
    r"|update_only_fields\..*\.test_empty_update_fields_positional_a?save)$": (
        "Django 5.2 warns of positional arguments where save() was called: in any override of it"
    ),
    r"migrations\.test_commands\.MakeMigrationsTests\.test_makemigrations_(update|no_changes)$": (
        "has the models differ from test migrations by a known list of operations: there are more"
    ),
    # These, with --scope all.
    r"check_framework\.test_model_checks\.DuplicateDBTableTests\.test_collision_": (
        "two models with one table: the constraint, which is named by it, isn't unique either"
    ),
    r"invalid_models_tests\..*IntegerFieldTests\.test_max_length_warning \(name='fence'\)": (
        "wants a warning for every IntegerField of the model, as they have max_length"
    ),
    r"managers_regress\.tests\.TestManagerInheritance\.test_base_manager_inheritance$": (
        "a child of a model with a base manager of its own takes Meta of the mixin: any base's"
    ),
    r"managers_regress\.tests\.TestManagerInheritance\.test_manager_no_duplicates$": (
        "wants _meta.managers to be the model's own alone"
    ),
}


def main() -> int:
    options = _arguments()
    suite = _Suite(options)
    unexplained = 0
    for app in options.apps or APPS.split():
        if not (suite.tests / app).is_dir():
            continue
        unexplained += suite.compare(app)
    suite.summary()
    return 1 if unexplained else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("apps", nargs="*", help="apps of Django's tests, or labels within them")
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument(
        "--scope",
        choices=["models", "all"],
        default="models",
        help="re-base the classes of modules `models` alone, or those within tests too",
    )
    parser.add_argument("--work", type=Path, default=HERE.parent.parent / ".django_suite")
    parser.add_argument("--package", type=Path, default=HERE.parent.parent)
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for one run of an app")
    parser.add_argument("--again", action="store_true", help="run what is recorded already, too")
    return parser.parse_args()


class _Suite:
    def __init__(self, options: argparse.Namespace) -> None:
        import django

        from tests.sdists import fetched

        self.options = options
        self.version = django.__version__
        self.work: Path = options.work.resolve()
        self.tests = fetched("django", self.version, self.work) / "tests"
        self.records = self.work / f"{self.version}-{options.database}"
        self.records.mkdir(parents=True, exist_ok=True)
        self.settings = _write_settings(self.records, options.database)
        self.totals: Counter[str] = Counter()

    def compare(self, app: str) -> int:
        again, scope = self.options.again, self.options.scope
        plain = self.run(app, "plain", again=False)
        column = self.run(app, f"column-{scope}", again=False)
        fenced = self.run(app, f"fenced-{scope}", again=again)
        new = {test: text for test, text in fenced["failed"].items() if test not in plain["failed"]}
        by_column = {
            test: text for test, text in new.items() if _alike(text, column["failed"].get(test))
        }
        left = {test: text for test, text in new.items() if test not in by_column}
        unexplained = {test: text for test, text in left.items() if not explanation(test)}
        self.totals += Counter(
            {
                "tests of the models as they are": plain["run"],
                "  of which fail": len(plain["failed"]),
                "tests of re-based models": fenced["run"],
                "  of models": fenced["rebased"],
                "  new failures": len(new),
                "    as with any column more": len(by_column),
                "    expected": len(left) - len(unexplained),
                "    unexplained": len(unexplained),
            }
        )
        print(
            f"{app}: {plain['run']} run as they are, {len(plain['failed'])} fail; "
            f"{fenced['run']} run on {fenced['rebased']} models re-based, {len(new)} fail newly: "
            f"{len(by_column)} for the column, {len(left) - len(unexplained)} as expected, "
            f"{len(unexplained)} unexplained "
            f"[{plain['seconds']:.0f} + {column['seconds']:.0f} + {fenced['seconds']:.0f} s]",
            flush=True,
        )
        for test, text in unexplained.items():
            print(f"    {test}: {_last_line(text)}", flush=True)
        return len(unexplained)

    def run(self, app: str, how: str, again: bool) -> dict[str, Any]:
        from tests.sdists import run_logged

        record = self.records / f"{app}.{how}.json"
        if record.exists() and not again:
            return dict(json.loads(record.read_text()))
        noted = record.with_suffix(".part")
        noted.unlink(missing_ok=True)
        command = [sys.executable, "-W", "ignore", str(HERE), "--worker", how, str(noted)]
        command += [str(self.tests), "--settings", self.settings, "--parallel=1", "--noinput", app]
        began = time.monotonic()
        path = [str(self.options.package.resolve()), str(self.records)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        options = {"cwd": self.tests, "env": environment}
        code = run_logged(command, record.with_suffix(".log"), self.options.timeout, **options)
        if noted.exists():
            result = json.loads(noted.read_text())
            noted.unlink()
        else:
            text = record.with_suffix(".log").read_text()
            result = {"run": 0, "skipped": 0, "rebased": 0, "failed": {f"{app} (whole)": text}}
            result["failed"][f"{app} (whole)"] += f"\nno result, exit status {code}"
        result["seconds"] = time.monotonic() - began
        record.write_text(json.dumps(result, indent=1))
        return dict(result)

    def summary(self) -> None:
        print(f"\nDjango {self.version}, {self.options.database}, scope {self.options.scope}:")
        for what, number in self.totals.items():
            print(f"{number:8} {what}")


#: What differs between two runs, or with any other class: addresses, directories, modules.
_VARYING = r" at 0x[0-9a-f]+|/\S+/|\b(?:django_fencedlock|django_suite_column)[.\w]*"


def explanation(test: str) -> str | None:
    return next((why for known, why in EXPECTED.items() if re.search(known, test)), None)


def _alike(text: str, other: str | None) -> bool:
    """Whether a test fails for the same reason with a column alone as with the mixin."""
    return other is not None and _error(text) == _error(other)


def _error(text: str) -> str:
    text = _last_line(text, whole=True)
    return re.sub(_VARYING, "", text)


def _last_line(text: str, whole: bool = False) -> str:
    lines = text.strip().splitlines()
    at = [
        number
        for number, line in enumerate(lines)
        if re.match(r"[\w.]+(Error|Exception|Exit|Warning|DoesNotExist|Lease|Fence)\b", line)
    ]
    found = lines[at[-1] if at else -1 :]
    return "\n".join(found) if whole else found[0][:300]


_COLUMN = """
from django.db import models


class ColumnField(models.BigIntegerField):
    db_returning = False

    def __init__(self, **options):
        options.update(default=0, db_default=0, editable=False, serialize=False)
        super().__init__(**options)

    def contribute_to_class(self, cls, name, *args, **options):
        concrete = [base for base in cls.__mro__[1:] if hasattr(base, "_meta")]
        if any(base._meta.fields for base in concrete if not base._meta.abstract):
            return
        self.creation_counter = models.Field.creation_counter
        models.Field.creation_counter += 1
        super().contribute_to_class(cls, name, *args, **options)


class ColumnModel(models.Model):
    fence = ColumnField()

    class Meta:
        abstract = True
"""


def _write_settings(directory: Path, database: str) -> str:
    if database == "sqlite":
        databases: dict[str, Any] = {
            alias: {"ENGINE": "django.db.backends.sqlite3"} for alias in ("default", "other")
        }
    else:
        url = urlsplit(os.environ["DJANGO_SUITE_POSTGRES"])
        server = {
            "ENGINE": "django.db.backends.postgresql",
            "HOST": url.hostname,
            "PORT": str(url.port or 5432),
            "USER": unquote(url.username or "postgres"),
            "PASSWORD": unquote(url.password or ""),
        }
        databases = {
            "default": {**server, "NAME": "django_suite"},
            "other": {**server, "NAME": "django_suite_other"},
        }
        for alias, entry in databases.items():
            entry["TEST"] = {"NAME": f"test_{directory.name}_{alias}".replace(".", "_")}
            entry["TEST"]["NAME"] = entry["TEST"]["NAME"].replace("-", "_")
    (directory / "django_suite_column.py").write_text(_COLUMN)
    (directory / "django_suite_settings.py").write_text(
        f"DATABASES = {databases!r}\n"
        "SECRET_KEY = 'django_tests_secret_key'\n"
        "PASSWORD_HASHERS = ['django.contrib.auth.hashers.MD5PasswordHasher']\n"
        "DEFAULT_AUTO_FIELD = 'django.db.models.AutoField'\n"
        "USE_TZ = False\n"
        "FENCEDLOCK_WITHOUT_LOCK = 'allow'\n"
    )
    return "django_suite_settings"


# The process that runs the tests of one app


def worker(how: str, record: str, tests: str, *arguments: str) -> None:
    """Be runtests.py, with the models of its apps re-based and the result noted."""
    result: dict[str, Any] = {"run": 0, "skipped": 0, "rebased": 0, "failed": {}}
    sys.path.insert(0, tests)
    script = Path(tests) / "runtests.py"
    source = script.read_text()
    how, _, scope = how.partition("-")
    if how == "fenced":
        source = source.replace(
            "ALWAYS_INSTALLED_APPS = [", 'ALWAYS_INSTALLED_APPS = [\n    "django_fencedlock",'
        )
    if how != "plain":
        rebased = _rebase(Path(tests), how, scope, result)
        _add_missing_columns(rebased)
    _note(Path(record), result)
    sys.argv = [str(script), *arguments]
    # The script is the module __main__: tests that start processes look there.
    main_module = sys.modules["__main__"]
    main_module.__dict__.update(__file__=str(script))
    exec(compile(source, str(script), "exec"), main_module.__dict__)


def _rebase(tests: Path, how: str, scope: str, result: dict[str, Any]) -> list[Any]:
    from django.db import models
    from django.db.models.base import ModelBase

    create = ModelBase.__new__
    rebased: list[Any] = []

    def is_wanted(module: str, name: str) -> bool:
        parts = module.split(".")
        if not (tests / parts[0]).is_dir() or f"{module}.{name}" in KEPT:
            return False
        return scope == "all" or any(part.startswith("models") for part in parts[1:])

    def base() -> Any:
        # Not before the apps are loaded.
        if how == "column":
            from django_suite_column import ColumnModel

            return ColumnModel
        from django_fencedlock.models import FencedModel

        return FencedModel

    def rebasing(meta: Any, name: str, bases: Any, attrs: Any, **options: Any) -> Any:
        wanted = models.Model in bases and is_wanted(attrs.get("__module__", ""), name)
        if wanted:
            bases = tuple(base() if each is models.Model else each for each in bases)
            result["rebased"] += 1
        made = create(meta, name, bases, attrs, **options)
        if any(hasattr(each, "fence") for each in made.__mro__):
            rebased.append(made)
        return made

    ModelBase.__new__ = staticmethod(rebasing)  # type: ignore[assignment,method-assign]
    return rebased


def _add_missing_columns(rebased: list[Any]) -> None:
    """Once the database is made: some apps make their tables by migrations, without the column."""
    from django.core.management.commands.migrate import Command
    from django.db import connections
    from django.test.runner import DiscoverRunner

    setup_databases = DiscoverRunner.setup_databases
    handle = Command.handle
    migrating = False

    def noting(self: Any, **options: Any) -> Any:
        nonlocal migrating
        migrating = True
        try:
            return setup_databases(self, **options)
        finally:
            migrating = False

    def completing(self: Any, *args: Any, **options: Any) -> Any:
        answer = handle(self, *args, **options)
        if migrating:
            complete(connections[options["database"]])
        return answer

    def complete(connection: Any) -> None:
        with connection.cursor() as cursor:
            tables = connection.introspection.table_names(cursor)
            there = {}
            for model in rebased:
                table = model._meta.db_table
                if not model._meta.abstract and table in tables:
                    columns = connection.introspection.get_table_description(cursor, table)
                    there[model] = {column.name for column in columns}
        for model, columns in there.items():
            for field in model._meta.local_concrete_fields:
                if field.name == "fence" and field.column not in columns:
                    with connection.schema_editor() as editor:
                        editor.add_field(model, field)
                        for constraint in model._meta.constraints:
                            if constraint.name.endswith("fence_rejected"):
                                editor.add_constraint(model, constraint)

    DiscoverRunner.setup_databases = noting  # type: ignore[method-assign]
    Command.handle = completing  # type: ignore[method-assign]


def _note(record: Path, result: dict[str, Any]) -> None:
    from django.test.runner import DiscoverRunner

    run_suite = DiscoverRunner.run_suite

    def noting(self: Any, suite: Any, **options: Any) -> Any:
        found = run_suite(self, suite, **options)
        # Tests of the runner itself run suites of their own.
        if found.testsRun >= result["run"]:
            result["run"] = found.testsRun
            result["skipped"] = len(found.skipped)
            result["failed"] = {}
            for test, text in _failures(found):
                result["failed"].setdefault(test, text)
            record.write_text(json.dumps(result, indent=1))
        return found

    DiscoverRunner.run_suite = noting  # type: ignore[method-assign]


def _failures(found: Any) -> Iterator[tuple[str, str]]:
    for test, text in [*found.failures, *found.errors]:
        # A sub-test's id has its parameters, with addresses of objects among them.
        yield re.sub(_VARYING, "", test.id()), text
    for test in found.unexpectedSuccesses:
        yield test.id(), "unexpected success"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        sys.exit(main())
