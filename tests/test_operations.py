"""The trigger on real PostgreSQL: what it refuses, and that whatever the package writes passes."""

import pytest
from django.core import serializers
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connections, migrations, models, transaction
from django.db.migrations.state import ModelState, ProjectState
from django.db.migrations.writer import MigrationWriter

from django_fencedlock import lock
from django_fencedlock.exceptions import StaleFence
from django_fencedlock.operations import (
    FENCE_LOWERED,
    NAME,
    VERSION_KEPT,
    FenceTrigger,
    RemoveFenceTrigger,
    arguments_of,
)
from tests.models import Account, Called, Contract, Document, Invoice, LedgerLine
from tests.test_doctor import Only

pytestmark = pytest.mark.django_db(databases=["default", "postgres"])
MODELS = [Invoice, Contract, Document, LedgerLine]
NAMED_BY = {LedgerLine: ["account"]}


@pytest.fixture(autouse=True)
def on_postgres(settings):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}


@pytest.fixture
def triggers():
    for model in MODELS:
        run(FenceTrigger(model.__name__, named_by=NAMED_BY.get(model, ())))


def state_of(*models):
    return ProjectState({("tests", m._meta.model_name): ModelState.from_model(m) for m in models})


def run(operation, *, back=False, state=None, alias="postgres"):
    before = state or state_of(Account, *MODELS)
    after = before.clone()
    operation.state_forwards("tests", after)
    with connections[alias].schema_editor() as editor:
        if back:
            operation.database_backwards("tests", editor, after, before)
        else:
            operation.database_forwards("tests", editor, before, after)
    return after


def execute(sql, *given):
    with connections["postgres"].cursor() as cursor:
        cursor.execute(sql, given)


def refused(sql, *given):
    with pytest.raises(OperationalError) as caught, transaction.atomic(using="postgres"):
        execute(sql, *given)
    return caught.value.__cause__.sqlstate, str(caught.value)


def triggers_and_functions():
    with connections["postgres"].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_trigger WHERE tgname = %s", [NAME])
        (triggers,) = cursor.fetchone()
        cursor.execute("SELECT count(*) FROM pg_proc WHERE proname = %s", [NAME])
        return triggers, cursor.fetchone()[0]


def arguments_of_triggers():
    with connections["postgres"].cursor() as cursor:
        cursor.execute("SELECT tgargs FROM pg_trigger WHERE tgname = %s", [NAME])
        return [tuple(bytes(each).decode().split("\0")[:-1]) for (each,) in cursor.fetchall()]


def invoice(**values):
    return Invoice.objects.using("postgres").create(**values)


@pytest.mark.usefixtures("triggers")
class TestWhatIsRefused:
    def test_a_lower_fence_is_refused_with_a_sqlstate_of_its_own_and_the_row(self):
        row = invoice()
        execute("UPDATE tests_invoice SET fence = 9")
        state, message = refused("UPDATE tests_invoice SET amount = 1, fence = 8")
        assert state == FENCE_LOWERED
        assert f"tests_invoice (id = {row.pk}) rejected: it lowers the fence from 9 to 8" in message
        assert "HINT" in message

    def test_one_row_that_is_refused_stops_the_whole_statement(self):
        invoice(), invoice()
        execute("UPDATE tests_invoice SET fence = id")
        refused("UPDATE tests_invoice SET amount = 1, fence = (SELECT min(id) FROM tests_invoice)")
        assert not Invoice.objects.using("postgres").filter(amount=1)

    def test_a_fence_that_is_left_as_it_is_passes(self):
        invoice()
        execute("UPDATE tests_invoice SET fence = 9")
        execute("UPDATE tests_invoice SET amount = 1")
        execute("UPDATE tests_invoice SET amount = 2, fence = 9")

    def test_a_change_needs_the_version(self):
        Document.objects.using("postgres").create(version=0)
        state, message = refused("UPDATE tests_document SET text = 'x'")
        assert state == VERSION_KEPT
        assert "it takes the version from 0 to 0" in message
        execute("UPDATE tests_document SET text = 'x', version = version + 1")
        execute("UPDATE tests_document SET text = text")  # It changes nothing.

    def test_a_lower_version_is_refused_even_if_nothing_else_changes(self):
        Document.objects.using("postgres").create()
        execute("UPDATE tests_document SET text = 'x', version = 7")
        assert refused("UPDATE tests_document SET version = 6")[0] == VERSION_KEPT

    def test_an_upsert_is_an_update_as_well(self):
        row = invoice()
        execute("UPDATE tests_invoice SET fence = 9")
        state, _ = refused(
            "INSERT INTO tests_invoice (id, amount, note, fence) VALUES (%s, 1, '', 8) "
            "ON CONFLICT (id) DO UPDATE SET fence = excluded.fence",
            row.pk,
        )
        assert state == FENCE_LOWERED


@pytest.mark.usefixtures("triggers")
class TestWhatPasses:
    @pytest.mark.parametrize("model", [Invoice, Contract])
    def test_everything_under_a_lease(self, model):
        text = "note" if model is Invoice else "text"
        rows = model.objects.using("postgres")
        pk = rows.create().pk
        for value in ("a", "b"):
            with model.fencing.lock(pk=pk):
                row = rows.get(pk=pk)
                setattr(row, text, value)
                row.save()
                setattr(row, text, value * 2)
                row.save(update_fields=[text])
                assert rows.filter(pk=pk).update(**{text: value * 3}) == 1
                row = rows.get(pk=pk)
                setattr(row, text, value * 4)
                assert rows.bulk_update([row], [text]) == 1
        with model.fencing.lock(pk=pk):
            assert rows.filter(pk=pk).delete()[0] == 1

    @pytest.mark.parametrize("model", [Invoice, Contract, Document])
    def test_everything_without_a_lease_where_that_is_allowed(self, model, settings):
        settings.FENCEDLOCK_WITHOUT_LOCK = "allow"
        text = "note" if model is Invoice else "text"
        rows = model.objects.using("postgres")
        row = rows.create()
        setattr(row, text, "a")
        row.save()
        rows.filter(pk=row.pk).update(**{text: "b"})
        row = rows.get(pk=row.pk)
        setattr(row, text, "c")
        rows.bulk_update([row], [text])
        rows.get(pk=row.pk).delete()

    @pytest.mark.parametrize("model", [Invoice, Contract, Document])
    def test_fixtures_over_rows_that_are_there(self, model, settings):
        settings.FENCEDLOCK_WITHOUT_LOCK = "allow"
        text = "note" if model is Invoice else "text"
        row = model.objects.using("postgres").create()
        setattr(row, text, "of the fixture")
        dump = serializers.serialize("json", [row])
        for loaded in serializers.deserialize("json", dump, using="postgres"):
            loaded.save(using="postgres")
        row.refresh_from_db()
        assert getattr(row, text) == "of the fixture"

    def test_a_stale_bulk_statement_still_raises_what_it_did_without_a_trigger(self):
        row = invoice()
        execute("UPDATE tests_invoice SET fence = 1000")
        with Invoice.fencing.lock(pk=row.pk), pytest.raises(StaleFence):
            Invoice.objects.using("postgres").filter(pk=row.pk).update(amount=1)

    def test_a_key_that_is_set_to_null_by_a_cascade(self, settings):
        settings.FENCEDLOCK_WITHOUT_LOCK = "allow"
        account = Account.objects.using("postgres").create()
        row = invoice(account=account)
        execute("UPDATE tests_invoice SET fence = 9")
        account.delete()
        row.refresh_from_db()
        assert row.account is None


@pytest.mark.usefixtures("triggers")
class TestMoves:
    """Tokens of two locks can't be compared: a row that is given to another may get a lower one."""

    @pytest.fixture
    def accounts(self):
        return [Account.objects.using("postgres").create() for _ in range(2)]

    @pytest.fixture
    def line(self, accounts):
        old, _ = accounts
        for _ in range(3):
            with LedgerLine.fencing.lock(account=old) as lease:
                pass
        with LedgerLine.fencing.lock(account=old) as lease:
            line = LedgerLine.objects.using("postgres").create(account=old)
        assert line.fence == lease.token == 4
        return line

    def test_a_row_that_is_given_to_another_lock_takes_its_lower_token(self, accounts, line):
        old, new = accounts
        with LedgerLine.fencing.lock(account=old), LedgerLine.fencing.lock(account=new) as lease:
            lines = LedgerLine.objects.using("postgres")
            assert lines.filter(account=old).update(account=new, amount=7) == 1
            line.refresh_from_db()
            assert (line.account, line.amount, line.fence) == (new, 7, lease.token)
            assert lease.token < 4
            line.amount = 8
            line.save()

    def test_a_row_that_moved_without_a_lease_has_to_go_back_first(self, accounts, line, settings):
        old, new = accounts
        lines = LedgerLine.objects.using("postgres")
        settings.FENCEDLOCK_WITHOUT_LOCK = "allow"
        assert lines.filter(account=old).update(account=new) == 1
        assert lines.get().fence == 4
        settings.FENCEDLOCK_WITHOUT_LOCK = "reject"
        stuck = pytest.raises(StaleFence, match="written under token 4 already")
        with LedgerLine.fencing.lock(account=new), stuck, transaction.atomic(using="postgres"):
            lines.get().save()
        settings.FENCEDLOCK_WITHOUT_LOCK = "allow"
        assert lines.filter(account=new).update(account=old) == 1
        settings.FENCEDLOCK_WITHOUT_LOCK = "reject"
        with LedgerLine.fencing.lock(account=old), LedgerLine.fencing.lock(account=new) as lease:
            assert lines.filter(account=old).update(account=new) == 1
            lines.get().save()
            assert lines.get().fence == lease.token == 2

    def test_where_a_callable_names_the_locks_raw_sql_moves(self, settings):
        settings.FENCEDLOCK_WITHOUT_LOCK = "allow"
        run(FenceTrigger("Called", named_by=["amount"]), state=state_of(Called))
        rows = Called.objects.using("postgres")
        row = rows.create(amount=0)
        settings.FENCEDLOCK_WITHOUT_LOCK = "reject"
        for _ in range(3):
            with lock("called:0"):
                rows.get().save()
        with lock("called:0") as old, lock("called:1") as new, old.atomic(), new.atomic():
            execute("UPDATE tests_called SET amount = 1, fence = 0 WHERE id = %s", row.pk)
        with lock("called:1") as lease:
            rows.get().save()
            assert rows.get().fence == lease.token == 2

    def test_a_lower_fence_in_place_is_refused(self, accounts, line):
        for setting in ("amount = 1", f"account_id = {accounts[0].pk}", "id = id + 1000"):
            state, message = refused(f"UPDATE tests_ledgerline SET {setting}, fence = 3")
            assert state == FENCE_LOWERED
            assert "it lowers the fence from 4 to 3" in message

    def test_a_row_whose_lock_is_named_by_its_key_moves_by_its_key(self):
        invoice(note="of a key")
        execute("UPDATE tests_invoice SET fence = 9")
        execute("UPDATE tests_invoice SET id = id + 1000, fence = 1")
        assert refused("UPDATE tests_invoice SET note = '', fence = 0")[0] == FENCE_LOWERED

    def test_one_of_several_columns_is_enough(self, accounts, line):
        run(FenceTrigger("LedgerLine", named_by=["amount", "account_id", "pk"]))
        for setting in ("amount = 1", f"account_id = {accounts[1].pk}", "id = id + 1000"):
            execute("UPDATE tests_ledgerline SET fence = 4")
            execute(f"UPDATE tests_ledgerline SET {setting}, fence = 3")
        assert refused("UPDATE tests_ledgerline SET fence = 2")[0] == FENCE_LOWERED

    def test_a_move_has_to_raise_the_version_as_well(self):
        run(FenceTrigger("Contract", named_by=["text"]))
        Contract.objects.using("postgres").create()
        execute("UPDATE tests_contract SET fence = 9")
        assert refused("UPDATE tests_contract SET fence = 1, text = 'x'")[0] == VERSION_KEPT
        execute("UPDATE tests_contract SET fence = 1, text = 'x', version = version + 1")
        assert refused("UPDATE tests_contract SET fence = 0, version = 9")[0] == FENCE_LOWERED

    def test_a_renamed_column_makes_it_strict_until_it_is_made_again(self, line, accounts):
        execute("ALTER TABLE tests_ledgerline RENAME COLUMN account_id TO owner_id")
        moving = f"UPDATE tests_ledgerline SET owner_id = {accounts[1].pk}, fence = 3"
        assert refused(moving)[0] == FENCE_LOWERED


class TestTheOperation:
    def test_backwards_drops_the_trigger_and_with_the_last_one_the_function(self):
        run(FenceTrigger("Invoice"))
        run(FenceTrigger("Contract"))
        assert triggers_and_functions() == (2, 1)
        run(FenceTrigger("Invoice"), back=True)
        assert triggers_and_functions() == (1, 1)
        run(FenceTrigger("Contract"), back=True)
        assert triggers_and_functions() == (0, 0)

    def test_the_trigger_outlives_that_the_table_and_the_key_are_renamed(self):
        row = invoice()
        run(FenceTrigger("Invoice"))
        state = run(migrations.RenameModel("Invoice", "Bill"))
        state = run(migrations.RenameField("Bill", "note", "remark"), state=state)
        execute("ALTER TABLE tests_bill RENAME COLUMN id TO number")
        execute("UPDATE tests_bill SET fence = 9")
        assert f"tests_bill (number = {row.pk})" in refused("UPDATE tests_bill SET fence = 8")[1]
        run(FenceTrigger("Bill"), state=state, back=True)
        assert triggers_and_functions() == (0, 0)

    def test_it_is_removed_before_the_column_that_it_watches(self):
        run(FenceTrigger("Invoice"))
        run(RemoveFenceTrigger("Invoice"))
        assert triggers_and_functions() == (0, 0)
        run(RemoveFenceTrigger("Invoice"), back=True)
        assert triggers_and_functions() == (1, 1)
        run(RemoveFenceTrigger("Invoice"))
        run(migrations.RemoveField("Invoice", "fence"))

    def test_columns_of_any_kind_may_come_later(self):
        Document.objects.using("postgres").create()
        run(FenceTrigger("Document"))
        field = models.GeneratedField(
            expression=models.functions.Upper("text"),
            output_field=models.CharField(max_length=50),
            db_persist=True,
        )
        run(migrations.AddField("Document", "upper", field))
        execute("UPDATE tests_document SET text = text")
        assert refused("UPDATE tests_document SET text = 'x'")[0] == VERSION_KEPT

    def test_a_model_without_the_columns_is_refused_by_name(self):
        with pytest.raises(ImproperlyConfigured, match=r"FenceTrigger\('Account'\).*tests_account"):
            run(FenceTrigger("Account"))

    def test_a_column_of_another_kind_that_is_called_version_is_left_alone(self):
        """The fields of migrations are plain, and only the constraint tells which are ours."""
        columns = {each: models.BigIntegerField(db_default=0) for each in ("fence", "version")}
        fields = [("id", models.BigAutoField(primary_key=True)), *columns.items()]
        ours = models.CheckConstraint(
            condition=models.Q(fence__gte=0), name="tests_meter_fence_rejected"
        )
        for constraints, expected in (([], ("", "")), ([ours], ("fence", ""))):
            model = ModelState("tests", "Meter", fields, options={"constraints": constraints})
            state = ProjectState({("tests", "meter"): model})
            assert arguments_of(state.apps.get_model("tests.Meter")) == expected
        # The constraint keeps its name.
        migrations.RenameModel("Meter", "Gauge").state_forwards("tests", state)
        assert arguments_of(state.apps.get_model("tests.Gauge")) == ("fence", "")
        migrations.AlterModelTable("Gauge", "gauges").state_forwards("tests", state)
        assert arguments_of(state.apps.get_model("tests.Gauge")) == ("fence", "")

    def test_it_does_nothing_where_the_model_is_not(self, settings, django_assert_num_queries):
        operation, state = FenceTrigger("Invoice"), state_of(Account, *MODELS)
        editor = connections["default"].SchemaEditorClass(connections["default"])
        with django_assert_num_queries(0):
            operation.database_forwards("tests", editor, state, state)
            operation.database_backwards("tests", editor, state, state)
        settings.DATABASE_ROUTERS = [Only("default")]
        run(FenceTrigger("Invoice"))
        assert triggers_and_functions() == (0, 0)

    def test_what_names_the_lock_is_a_list_of_columns_of_the_table(self):
        with pytest.raises(ImproperlyConfigured, match=r"'acount'.*tests_ledgerline.*account"):
            run(FenceTrigger("LedgerLine", named_by=["acount"]))
        with pytest.raises(TypeError, match=r"named_by=\['account'\]"):
            FenceTrigger("LedgerLine", named_by="account")

    def test_removing_it_backwards_makes_the_same_trigger(self):
        run(RemoveFenceTrigger("LedgerLine", named_by=["account"]), back=True)
        assert arguments_of_triggers() == [("fence", "", "account_id")]

    @pytest.mark.parametrize("names", [(), ["account", "pk"]])
    @pytest.mark.parametrize("kind", [FenceTrigger, RemoveFenceTrigger])
    def test_it_is_written_to_a_migration_and_names_it(self, kind, names):
        written = kind("Invoice", named_by=names) if names else kind("Invoice")
        migration = type("Migration", (migrations.Migration,), {"operations": [written]})
        text, found = MigrationWriter(migration("0002", "tests")).as_string(), {}
        exec(text, found)
        (operation,) = found["Migration"].operations
        assert (type(operation), operation.model_name) == (kind, "Invoice")
        assert operation.named_by == tuple(names)
        assert ("named_by" in text) is bool(names)
        assert operation.migration_name_fragment.endswith("invoice_fence_trigger")
        assert "Invoice" in operation.describe()
