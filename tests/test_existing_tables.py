"""docs/guides/adopting.md: a big table gets its columns while the code of before is running."""

import re
import textwrap
from pathlib import Path

import pytest
from django.db import IntegrityError, connections, migrations, models, transaction
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.state import ModelState, ProjectState
from django.test.utils import isolate_apps

from django_fencedlock.models import FencedModel, VersionedModel

PAGE = Path(__file__).parent.parent / "docs/guides/adopting.md"
ON_POSTGRES = pytest.mark.django_db(databases=["default", "postgres"])
ROWS = 20_000


def before():
    state = ModelState("billing", "Invoice", list(before_fields().items()))
    return ProjectState({("billing", "invoice"): state})


def before_fields():
    key = models.BigAutoField(primary_key=True, serialize=False, verbose_name="ID")
    return {"id": key, "text": models.TextField()}


def step(name):
    blocks = re.findall(r"```python\n(.*?)\n *```", PAGE.read_text(), re.S)
    blocks = [textwrap.dedent(each) for each in blocks]
    (code,) = [each for each in blocks if each.startswith(f"# billing/migrations/{name}.py\n")]
    found = {}
    exec(code, found)
    return found["Migration"].operations


STEPS = ("0002_fence", "0003_fence_rejected", "0004_fence_validated", "0005_fence_trigger")
COLUMN, CONSTRAINT, VALIDATED, TRIGGER = STEPS
REMOVAL = "0006_remove_fence"


def migrate(state, *names):
    for name in names:
        for operation in step(name):
            old, state = state, state.clone()
            operation.state_forwards("billing", state)
            with connections["postgres"].schema_editor() as editor:
                operation.database_forwards("billing", editor, old, state)
    return state


def ask(sql):
    with connections["postgres"].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()[0]


def execute(sql):
    with connections["postgres"].cursor() as cursor:
        cursor.execute(sql)


@pytest.fixture
def old():
    state = before()
    with connections["postgres"].schema_editor() as editor:
        editor.create_model(state.apps.get_model("billing", "Invoice"))
    execute(f"INSERT INTO billing_invoice (text) SELECT 'x' FROM generate_series(1, {ROWS})")
    return state


@ON_POSTGRES
class TestOnPostgres:
    def test_no_step_rewrites_the_table(self, old):
        node = ask("SELECT pg_relation_filenode('billing_invoice')")
        size = ask("SELECT pg_relation_size('billing_invoice')")
        migrate(old, *STEPS)
        assert ask("SELECT pg_relation_filenode('billing_invoice')") == node
        assert ask("SELECT pg_relation_size('billing_invoice')") == size
        assert ask("SELECT count(*) FROM billing_invoice WHERE fence = 0 AND version = 0") == ROWS
        assert ask("SELECT bool_and(convalidated) FROM pg_constraint WHERE contype = 'c'")

    def test_the_code_of_before_goes_on_after_each_step(self, old):
        for name in (COLUMN, CONSTRAINT, VALIDATED):
            old_code = before().apps.get_model("billing", "Invoice").objects.using("postgres")
            old = migrate(old, name)
            row = old_code.create(text="of the old code")
            row.text = "again"
            row.save()
            assert old_code.filter(pk=row.pk).update(text="more") == 1
            execute("INSERT INTO billing_invoice (text) VALUES ('raw')")

    def test_the_constraint_holds_for_new_writes_before_it_is_validated(self, old):
        migrate(old, COLUMN, CONSTRAINT)
        for column in ("fence", "version"):
            with pytest.raises(IntegrityError), transaction.atomic(using="postgres"):
                execute(f"UPDATE billing_invoice SET {column} = -1")

    def test_removing_the_package_leaves_the_table_as_it_was(self, old):
        new = migrate(old, *STEPS)
        execute("UPDATE billing_invoice SET fence = 7, version = 7 WHERE id = 1")
        # The code of before, or of afterwards, writes while the columns are there.
        assert before().apps.get_model("billing", "Invoice").objects.using("postgres").create()
        operations = MigrationAutodetector(new, old)._detect_changes()["billing"][0].operations
        assert [repr(each) for each in operations] == [repr(each) for each in step(REMOVAL)[1:]]
        after = migrate(new, REMOVAL)
        assert MigrationAutodetector(after, old)._detect_changes() == {}
        columns = "SELECT count(*) FROM information_schema.columns WHERE table_name = "
        assert ask(f"{columns}'billing_invoice'") == 2
        assert ask("SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'fencedlock%'") == 0

    def test_a_default_of_python_alone_would_stop_the_code_of_before(self, old):
        """Why the column says db_default."""
        field = models.BigIntegerField(default=0)
        operation, state = migrations.AddField("Invoice", "fence", field), old.clone()
        operation.state_forwards("billing", state)
        with connections["postgres"].schema_editor() as editor:
            operation.database_forwards("billing", editor, old, state)
        with pytest.raises(IntegrityError), transaction.atomic(using="postgres"):
            execute("INSERT INTO billing_invoice (text) VALUES ('raw')")


@pytest.mark.parametrize("bases", [(FencedModel,), (FencedModel, VersionedModel)])
def test_makemigrations_finds_nothing_more(bases):
    state = before()
    for name in STEPS:
        for operation in step(name):
            # "leave out what has `version` in it if yours gets none"
            if VersionedModel in bases or "version" not in repr(operation.deconstruct()):
                operation.state_forwards("billing", state)
    with isolate_apps("tests"):
        meta = type("Meta", (FencedModel.Meta,), {"app_label": "billing"})
        fields = {name: field.clone() for name, field in before_fields().items()}
        model = type("Invoice", bases, {"__module__": __name__, "Meta": meta, **fields})
        after = ProjectState({("billing", "invoice"): ModelState.from_model(model)})
    changes = MigrationAutodetector(state, after)._detect_changes()
    assert [each.operations for each in changes.get("billing", ())] == []


BASES = pytest.mark.parametrize("bases", [(FencedModel,), (VersionedModel, FencedModel)])


class TestWhatMakemigrationsShows:
    """The columns and the constraints, and nothing that imports the package."""

    def shown(self, bases, **attributes):
        plain = {"id": before_fields()["id"], "text": models.TextField()}
        with isolate_apps("tests"):
            self.old = old = self.state(**self.made((models.Model,), plain, attributes))
        with isolate_apps("tests"):
            new = self.state(**self.made(bases, plain, attributes))
        changes = MigrationAutodetector(old, new)._detect_changes()
        (migration,) = changes["tests"]
        return migration.operations

    def made(self, bases, plain, attributes):
        fields = {name: field.clone() for name, field in plain.items()}
        names = {"__module__": "tests.models"}
        bill = type("Bill", bases, {**names, **fields, **attributes})
        return {"bill": bill, "copy": type("Copy", (bill,), dict(names))}

    def state(self, **found):
        states = {("tests", name): ModelState.from_model(each) for name, each in found.items()}
        return ProjectState(states)

    @BASES
    def test_those_of_the_steps_and_no_others(self, bases):
        found = self.shown(bases)
        assert {type(each) for each in found} == {migrations.AddField, migrations.AddConstraint}
        columns = {each.name for each in found if isinstance(each, migrations.AddField)}
        assert columns == {"fence", "version"} if len(bases) == 2 else {"fence"}
        constraints = [each for each in found if isinstance(each, migrations.AddConstraint)]
        assert len(constraints) == len(columns)
        assert all(each.constraint.name.endswith("_rejected") for each in constraints)
