"""The system checks over the tables of fenced models."""

import re

import pytest
from django.db import connections, migrations
from django.db.migrations.state import ProjectState

from django_fencedlock.checks import check_tables
from django_fencedlock.models import Fencing, checks
from django_fencedlock.models.fields import constraint_name
from django_fencedlock.operations import NAME, FenceTrigger
from tests.models import Contract, Invoice, LedgerLine

ON_POSTGRES = pytest.mark.django_db(databases=["default", "postgres"])


def execute(alias, sql):
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)


def told(problems):
    return {problem.id: str(problem) for problem in problems}


def database_problems(alias):
    return [each for each in checks.table_problems([alias]) if each.id != "W026"]


@pytest.mark.django_db(databases=["default", "mariadb"])
def test_a_mariadb_that_ignores_constraints(request):
    assert told(database_problems("mariadb")) == {}
    request.addfinalizer(lambda: execute("mariadb", "SET check_constraint_checks = 1"))
    execute("mariadb", "SET check_constraint_checks = 0")
    assert "check_constraint_checks off" in told(database_problems("mariadb"))["W023"]


@pytest.mark.django_db(transaction=True, databases=["default", "mariadb"])
class TestCollations:
    """Locks' names are compared by every character, and so has what they are made of to be."""

    @pytest.fixture
    def collate(self):
        def alter(collation):
            sql = f"ALTER TABLE tests_seat MODIFY `row` varchar(5) COLLATE {collation} NOT NULL"
            execute("mariadb", sql)

        yield alter
        alter("latin1_swedish_ci")

    def problems(self):
        found = checks.table_problems(["mariadb"])
        return {str(problem).split(" names")[0]: str(problem) for problem in found}

    def problem(self):
        return self.problems().get("Column 'row' of 'tests_seat'")

    @pytest.mark.parametrize(
        ("collation", "alike"),
        [
            ("utf8mb4_general_ci", "'a' for 'A' and 'e' for 'é' and 'a' for 'a '"),
            ("utf8mb4_unicode_nopad_ci", "'a' for 'A' and 'e' for 'é'"),
            ("latin1_general_cs", "'a' for 'a '"),
            ("utf8mb4_bin", "'a' for 'a '"),
        ],
    )
    def test_one_that_takes_texts_for_each_other(self, collate, collation, alike):
        collate(collation)
        assert "names locks of tests.Seat, and database 'mariadb'" in self.problem()
        assert f"takes {alike} there: one value would" in self.problem()

    @pytest.mark.parametrize("collation", ["utf8mb4_nopad_bin", "latin1_nopad_bin"])
    def test_an_exact_one_is_in_order(self, collate, collation):
        collate(collation)
        assert self.problem() is None

    def test_what_is_named_as_the_remedy_is_one(self, collate):
        collate(re.search("db_collation='(.*?)'", self.problem())[1])
        assert self.problem() is None

    def test_keys_to_a_text_count_and_what_has_one_spelling_does_not(self):
        found = set(self.problems())
        columns = {
            "tests_parcel": ["colour", "owner_id"],
            "tests_stock": ["sku"],
            "tests_seat": ["row"],
            "tests_ticket": ["code"],
            "tests_depot": ["town"],
            "tests_bin": ["code"],
        }
        assert found == {
            f"Column {column!r} of {table!r}" for table in columns for column in columns[table]
        }
        assert "Give tests.Stock.sku the" in self.problems()["Column 'owner_id' of 'tests_parcel'"]

    def test_a_lock_is_made_of_a_column_that_is_not_migrated_yet(self):
        alter = "ALTER TABLE tests_parcel RENAME COLUMN"
        execute("mariadb", f"{alter} colour TO color")
        try:
            assert "Column 'colour' of 'tests_parcel'" not in self.problems()
        finally:
            execute("mariadb", f"{alter} color TO colour")


@pytest.mark.parametrize(
    "alias",
    [
        pytest.param("default", marks=pytest.mark.django_db(transaction=True)),
        pytest.param("postgres", marks=ON_POSTGRES),
        pytest.param(
            "mariadb", marks=pytest.mark.django_db(transaction=True, databases=["mariadb"])
        ),
    ],
)
def test_a_constraint_that_the_table_has_lost(alias):
    name = constraint_name(Invoice, "fence")
    before = ProjectState.from_apps(Invoice._meta.apps)
    remove, after = migrations.RemoveConstraint("Invoice", name), before.clone()
    remove.state_forwards("tests", after)
    assert told(database_problems(alias)) == {}
    with connections[alias].schema_editor() as editor:
        remove.database_forwards("tests", editor, before, after)
    try:
        found = check_tables(databases=[alias])
        (message,) = (each for each in found if not each.id.endswith("W026"))
    finally:
        with connections[alias].schema_editor() as editor:
            remove.database_backwards("tests", editor, after, before)
    assert message.id == "django_fencedlock.W024"
    assert f"'{name}'" in message.msg
    assert 'CHECK ("fence" >= 0)' in message.hint.replace("`", '"')


def test_no_database_is_asked_unless_it_is_named():
    assert check_tables() == []


@pytest.mark.slow
@ON_POSTGRES
class TestTriggers:
    @pytest.fixture(autouse=True)
    def trigger(self):
        self.install("LedgerLine", "account")

    def execute(self, sql):
        execute("postgres", sql)

    def install(self, name="Contract", *named_by, without=None):
        state = ProjectState.from_apps(Contract._meta.apps)
        if without:
            state.remove_field("tests", name.lower(), without)
        operation = FenceTrigger(name, named_by=named_by)
        with connections["postgres"].schema_editor() as editor:
            operation.database_forwards("tests", editor, state, state)

    def problem(self):
        return told(checks.table_problems(["postgres"])).get("W025")

    def test_one_that_is_there_is_in_order(self):
        self.install()
        assert self.problem() is None

    def test_one_that_is_disabled(self):
        self.install()
        self.execute(f"ALTER TABLE tests_contract DISABLE TRIGGER {NAME}")
        assert "is disabled" in self.problem()

    def test_one_of_before_the_table_had_a_version(self):
        self.install()
        self.execute(
            f"CREATE OR REPLACE TRIGGER {NAME} AFTER UPDATE ON tests_contract FOR EACH ROW "
            f"WHEN (NEW.fence < OLD.fence) EXECUTE FUNCTION {NAME}('fence', '')"
        )
        self.execute(f"COMMENT ON TRIGGER {NAME} ON tests_contract IS 'older'")
        assert "is another" in self.problem()
        self.install()
        assert self.problem() is None

    def test_one_whose_function_was_replaced(self):
        self.install()
        self.execute(
            f"CREATE OR REPLACE FUNCTION {NAME}() RETURNS trigger LANGUAGE plpgsql "
            "AS 'BEGIN RETURN NULL; END'"
        )
        assert "is another" in self.problem()

    def test_one_that_does_not_know_what_names_the_lock(self):
        self.install()
        self.install("LedgerLine")
        assert "tests.LedgerLine" in self.problem()
        assert "is another" in self.problem()
        assert "FenceTrigger('LedgerLine', named_by=['account'])." in self.problem()

    def test_what_a_callable_names_is_known_to_the_trigger_alone(self, monkeypatch):
        monkeypatch.setattr(LedgerLine, "fencing", Fencing(lambda row: "x"))
        for named_by in [(), ("account",), ("account_id", "amount"), ("pk",)]:
            self.install("LedgerLine", *named_by)
            assert self.problem() is None
        self.execute(
            f"CREATE OR REPLACE TRIGGER {NAME} AFTER UPDATE ON tests_ledgerline FOR EACH ROW "
            f"WHEN (NEW.fence < OLD.fence) EXECUTE FUNCTION {NAME}('', '', 'account_id')"
        )
        assert "FenceTrigger('LedgerLine', named_by=['account'])." in self.problem()

    @pytest.mark.parametrize(
        ("name", "field", "column"),
        [("LedgerLine", "account", "account_id"), ("Contract", "version", "version")],
    )
    def test_a_column_that_is_not_migrated_yet_is_not_missed(self, name, field, column):
        self.install()
        self.execute(f"ALTER TABLE tests_{name} DROP COLUMN {column} CASCADE")
        self.install(name, without=field)
        assert self.problem() is None
