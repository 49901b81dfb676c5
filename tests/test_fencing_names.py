"""How fenced models name their locks, and what the mixin leaves as it was."""

import copy
import datetime
import pickle
import uuid
from decimal import Decimal

import pytest
from django.apps import apps
from django.contrib import admin
from django.core import checks, serializers
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, models, transaction
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.questioner import MigrationQuestioner
from django.db.migrations.state import ModelState, ProjectState
from django.db.migrations.writer import MigrationWriter
from django.db.models.functions import Lower
from django.db.utils import DatabaseError
from django.forms.models import model_to_dict, modelform_factory
from django.test.utils import CaptureQueriesContext, isolate_apps

from django_fencedlock import LockRequired, lock
from django_fencedlock.models import FencedManager, FencedModel, Fencing, VersionedModel
from django_fencedlock.models.fields import RejectedRow, constraint_name
from django_fencedlock.models.queryset import BaseRowsManager
from tests import models as m
from tests.models import Account, Called, Colour, Contract, Invoice, LedgerLine, Parcel, Seat, Truck

UTC = datetime.UTC
NOON = datetime.datetime(2024, 5, 1, 12, tzinfo=UTC)


def name(model, **arguments):
    return model.fencing.lock(**arguments).name


@pytest.mark.parametrize(
    ("expected", "locks"),
    [
        ("tests.invoice:42", [Invoice.fencing.lock(pk=42), Invoice.fencing.lock(id="42")]),
        ("tests.invoice:42", map(Invoice.fencing.lock, (42, "42", " 42", Invoice(pk=42)))),
        ("tests.vehicle:1", map(Truck.fencing.lock, (1, m.Vehicle(pk=1), Truck(pk=1)))),
        ("tests.seat:A,1", map(Seat.fencing.lock, [("A", 1), ["A", "1"], Seat("A", 1)])),
        ("called:1", [Called.fencing.lock(Called(amount=3))]),
        ("tests.invoice:42", [Invoice(pk=pk).fencing.lock() for pk in (42, "42")]),
        ("tests.vehicle:1", [model.fencing.lock(pk=1) for model in (Truck, m.Trailer, m.Van)]),
        ("tests.vehicle:1", [m.Trailer(pk=1).fencing.lock()]),
        ("account:7", [LedgerLine.fencing.lock(account=each) for each in (Account(pk=7), 7)]),
        ("account:7", [LedgerLine.fencing.lock(account_id="7")]),
        ("account:7", [LedgerLine(account=Account(pk=7)).fencing.lock()]),
        ("account:7", [LedgerLine(account_id=7).fencing.lock()]),
        (
            "tests.seat:A,1",
            [Seat.fencing.lock(pk=("A", 1)), Seat(row="A", number=1).fencing.lock()],
        ),
        ("tests.seat:A,1", [Seat.fencing.lock(row="A", number="1")]),
        ("called:1", [Called(amount=3).fencing.lock()]),
    ],
)
def test_a_lock_is_named_by_its_row(expected, locks):
    assert {each.name for each in locks} == {expected}


@isolate_apps("tests")
def test_different_rows_have_different_names():
    class Cell(FencedModel):
        pk = models.CompositePrimaryKey("row", "column")
        row = models.CharField(max_length=20)
        column = models.CharField(max_length=20)

        class Meta:
            app_label = "tests"

    keys = [("a,b", "c"), ("a", "b,c"), ("a%2Cb", "c"), ("a%2C", "b,c"), ("a%", "b"), ("a", "%b")]
    assert len({name(Cell, pk=key) for key in keys}) == len(keys)
    assert name(Cell, pk=("a,b", "c,d")) == "tests.cell:a%2Cb,c,d"

    template = Fencing("cell {row} : {column}!")
    cells = [Cell(row="a", column="b : c"), Cell(row="a : b", column="c")]
    names = [template.__get__(cell, Cell).name() for cell in cells]
    assert names == ["cell a : b : c!", "cell a%20:%20b : c!"]
    template = Fencing("{row}x%{column}")
    cells = [Cell(row="a", column="x%b"), Cell(row="ax%", column="b")]
    names = [template.__get__(cell, Cell).name() for cell in cells]
    assert names == ["ax%x%b", "ax%25x%b"]


def test_values_of_many_kinds_have_one_text_each():
    plain = {"colour": "red", "day": "2024-05-01", "price": "5", "at": NOON, "owner": "abc"}
    plain["rank"] = 7
    expected = "red/2024-05-01/5.00/2024-05-01 12:00:00+00:00/abc/007"
    assert name(Parcel, **plain) == expected
    cet = datetime.timezone(datetime.timedelta(hours=1))
    same = {
        "colour": Colour.RED,
        "day": datetime.date(2024, 5, 1),
        "price": Decimal("5.000"),
        "at": NOON.astimezone(cet),
        "owner": m.Stock(pk=3, sku="abc"),
        "rank": "7",
    }
    assert name(Parcel, **same) == expected
    plain["owner_id"] = plain.pop("owner")
    assert Parcel(**plain).fencing.lock().name == expected
    assert Parcel(**same).fencing.lock().name == expected
    assert Parcel(**{**same, "price": Decimal("-0")}).fencing.lock().name.count("/0.00/") == 1


def test_a_key_in_another_spelling_is_the_same_key():
    key = uuid.uuid4()
    parcel = Parcel(pk=str(key).upper())
    parcel.fencing = None
    assert Fencing("p:{pk}").__get__(parcel, Parcel).name() == f"p:{key}"


class Slug(models.CharField):
    def pre_save(self, row, add):
        row.slug = row.title.lower()
        return row.slug


@pytest.mark.parametrize(
    "field",
    [
        models.GeneratedField(
            expression=Lower("title"), output_field=models.CharField(max_length=20), db_persist=True
        ),
        models.DateField(auto_now=True),
        models.DateTimeField(auto_now_add=True),
        Slug(max_length=20),
    ],
)
@isolate_apps("tests")
def test_a_value_that_is_made_when_the_row_is_saved_names_no_lock(field):
    """It would give the row to another lock, under whose lease nobody asked for."""

    class Entry(FencedModel):
        fencing = Fencing("entry:{slug}")

        title = models.CharField(max_length=20)
        slug = field

        class Meta:
            app_label = "tests"

    for use in (
        lambda: Entry(title="A").save(),
        lambda: Entry(title="A").fencing.lock(),
        lambda: Entry.objects.all().delete(),
    ):
        with pytest.raises(ImproperlyConfigured, match=r"uses {slug}, whose value is made"):
            use()


@isolate_apps("tests")
def test_a_key_that_is_made_when_the_row_is_added_names_its_lock():
    class Entry(FencedModel):
        slug = Slug(max_length=20, primary_key=True)
        title = models.CharField(max_length=20)

        class Meta:
            app_label = "tests"

    assert name(Entry, pk="a") == "tests.entry:a"


def test_the_terms_are_those_of_a_lock(settings):
    taken = Invoice.fencing.lock(pk=1, ttl=7, blocking_timeout=3)
    assert (taken.ttl, taken.blocking_timeout, taken.backend) == (7, 3, "default")
    settings.FENCEDLOCK = {"default": {}, "other": {"TTL": 9}}
    spec = Fencing("x:{pk}", backend="other")
    assert spec.__get__(None, Invoice).lock(pk=1).ttl == 9


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: name(Seat, pk=1), TypeError, "the primary key has 2 columns"),
        (lambda: name(Seat, row="A"), TypeError, r"named by row, number; lock\(\) was given row"),
        (lambda: name(Called, pk=1), TypeError, "named by a callable; lock.. was given pk"),
        (lambda: name(Invoice), TypeError, r"given nothing\. Write Invoice.fencing.lock.pk="),
        (lambda: name(Invoice, pk=1, note="x"), TypeError, "lock.. was given pk, note"),
        (lambda: name(Invoice, nonsense=1), TypeError, "lock.. was given nonsense"),
        (lambda: name(LedgerLine, pk=1), TypeError, r"named by account_id; .* pk\. .*account_id="),
        (lambda: name(LedgerLine, account=Invoice(pk=1)), TypeError, "has to be Account, not"),
        (lambda: Invoice().fencing.lock(), ValueError, "This Invoice has no lock yet"),
        (lambda: Seat(row=None, number=1).fencing.lock(), ValueError, "row, number is empty"),
        (lambda: Invoice(pk=1).fencing.lock(pk=1), TypeError, "of a row names itself; remove pk"),
        (lambda: Fencing(mode="lax"), ImproperlyConfigured, "'serialised', 'high_water'"),
        (lambda: Fencing(without_lock="no"), ImproperlyConfigured, "'reject', 'warn', 'allow'"),
    ],
)
def test_what_is_wrong_is_said(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


@pytest.mark.django_db
def test_a_name_that_cannot_be_made(settings):
    """It is an error, but where no write can need a lease."""
    spec = Fencing("x:{code}")
    with pytest.raises(ValueError, match="200 are allowed"):
        spec.__get__(m.Relaxed(code="y" * 300), m.Relaxed).lock()
    settings.FENCEDLOCK_WITHOUT_LOCK = "allow"
    row = Invoice(pk=b"no")
    with pytest.raises((TypeError, ValueError), match="expected a number"):
        row.save()


@pytest.mark.django_db
def test_an_error_carries_the_lock_that_is_needed():
    invoice = Invoice.objects.create()
    with lock("other"), pytest.raises(LockRequired) as caught:
        invoice.save()
    assert (caught.value.name, caught.value.held) == (f"tests.invoice:{invoice.pk}", ("other",))


# What the mixin leaves as it was


def test_its_columns_come_last():
    def names(fields):
        return [field.name for field in fields]

    assert names(Invoice._meta.fields) == ["id", "account", "amount", "note", "fence"]
    assert names(Contract._meta.fields)[:2] == names(m.Deed._meta.fields)[:2] == ["id", "text"]
    assert names(Truck._meta.fields) == ["id", "wheels", "fence", "vehicle_ptr", "load"]
    assert names(Truck._meta.local_fields) == ["vehicle_ptr", "load"]


def test_positional_arguments_are_the_models_own():
    invoice = Invoice(1, 2, 30, "note")
    assert (invoice.pk, invoice.account_id, invoice.amount, invoice.note) == (1, 2, 30, "note")
    assert invoice.fence == 0


def test_forms_and_serialisers_do_not_see_them():
    contract = Contract(text="x", fence=5, version=6)
    assert set(model_to_dict(contract)) == {"id", "text"}
    assert list(modelform_factory(Contract, fields="__all__").base_fields) == ["text"]
    assert admin.ModelAdmin(Contract, admin.site).get_fields(None) == ["text"]
    for form in ("json", "xml", "python"):
        text = str(serializers.serialize(form, [contract]))
        assert "fence" not in text
        assert "version" not in text.replace('<?xml version="1.0"', "").replace(
            'django-objects version="1.0"', ""
        )


@pytest.mark.django_db
def test_objects_can_be_copied_pickled_deferred_and_refreshed(django_assert_num_queries):
    invoice = Invoice.objects.create(amount=5)
    for twin in (copy.copy(invoice), copy.deepcopy(invoice), pickle.loads(pickle.dumps(invoice))):
        assert (twin.pk, twin.amount, twin.fence) == (invoice.pk, 5, 0)
        assert set(twin.__dict__) - {"_django_version"} == set(invoice.__dict__)
    models.QuerySet(Invoice).update(fence=9, amount=6)
    with django_assert_num_queries(1):
        invoice.refresh_from_db(fields=["amount"])
    assert (invoice.amount, invoice.fence) == (6, 0)
    with django_assert_num_queries(1):
        invoice.refresh_from_db()
    assert invoice.fence == 9
    found = Invoice.objects.only("note").get()
    assert found.get_deferred_fields() == {"account_id", "amount"}
    assert pickle.loads(pickle.dumps(Invoice.objects.all())).get() == invoice
    assert isinstance(pickle.loads(pickle.dumps(Invoice.objects)), FencedManager)


@pytest.mark.django_db
def test_saving_leaves_nothing_behind_in_the_object():
    for row in (Contract.objects.create(), Truck.objects.create()):
        before = set(row.__dict__)
        with row.fencing.lock():
            row.save()
        with pytest.raises(LockRequired), transaction.atomic():
            row.save()
        assert set(row.__dict__) == before


@pytest.mark.django_db
def test_validation_asks_the_database_nothing(django_assert_num_queries):
    contract = Contract.objects.create(text="x")
    with django_assert_num_queries(0):
        Contract(text="x").full_clean()
        contract.full_clean()


@pytest.mark.django_db(databases=["default", "postgres", "mariadb"])
def test_the_checks_have_nothing_to_say():
    # Of models, since other tests register Celery tasks. Django asks for the servers' versions.
    found = checks.run_checks(apps.get_app_configs(), tags=[checks.Tags.models])
    assert [message for message in found if message.is_serious()] == []


# Columns and constraints


def test_the_constraints_are_named_after_the_table():
    assert constraint_name(Invoice, "fence") == "tests_invoice_fence_rejected"
    assert constraint_name(Contract, "version") == "tests_contract_version_rejected"
    found = {each.name: each for each in Invoice._meta.constraints}
    assert isinstance(found["tests_invoice_fence_rejected"], RejectedRow)
    assert not any(isinstance(each, RejectedRow) for each in Truck._meta.constraints)


@isolate_apps("tests")
def test_long_names_do_not_collide():
    def make(table):
        class Meta:
            app_label = "tests"
            db_table = table

        return type(
            f"T{len(apps.all_models)}", (FencedModel,), {"__module__": __name__, "Meta": Meta}
        )

    names = {constraint_name(make("t" * 70 + end), "fence") for end in "ab"}
    assert len(names) == 2
    assert max(map(len, names)) <= 60
    assert constraint_name(make('"schema"."table"'), "fence") == "schema_table_fence_rejected"


@isolate_apps("tests")
def test_an_unmanaged_model_over_the_same_table_is_no_second_owner_of_the_constraint():
    class Table(FencedModel):
        class Meta:
            app_label = "tests"
            db_table = "shared"

    class View(FencedModel):
        class Meta:
            app_label = "tests"
            db_table = "shared"
            managed = False

    assert not View._meta.constraints
    assert constraint_name(Table, "fence") == constraint_name(View, "fence")


@isolate_apps("tests")
def test_own_constraints_are_kept_also_of_an_abstract_parent():
    positive = models.CheckConstraint(condition=models.Q(n__gt=0), name="%(class)s_positive")

    class Base(FencedModel):
        n = models.IntegerField()

        class Meta(FencedModel.Meta):
            abstract = True
            constraints = [positive]

    def concrete(name):
        meta = type("Meta", (Base.Meta,), {"app_label": "tests"})
        return type(name, (Base,), {"__module__": __name__, "Meta": meta})

    for model in (concrete("One"), concrete("Two")):
        found = [each.name for each in model._meta.constraints]
        label = model.__name__.lower()
        assert found == [f"{label}_positive", f"tests_{label}_fence_rejected"]
        assert isinstance(model._base_manager, BaseRowsManager)


@isolate_apps("tests")
def test_a_fenced_abstract_beside_a_fenced_concrete_parent_adds_no_second_column():
    class Abstract(FencedModel):
        class Meta:
            abstract = True

    class Place(FencedModel):
        class Meta:
            app_label = "tests"

    class Lot(Abstract, Place):
        class Meta:
            app_label = "tests"

    assert [field.name for field in Lot._meta.local_fields] == ["place_ptr"]
    assert Lot.fencing.table is Place


# Migrations


def _project(*models_):
    state = ProjectState()
    for model in models_:
        state.add_model(ModelState.from_model(model))
    return state


def _changes(before, after):
    detector = MigrationAutodetector(
        before.clone(), after.clone(), MigrationQuestioner({"ask_initial": True})
    )
    return detector.changes(graph=MigrationLoader(None).graph).get("tests", [])


@pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
@pytest.mark.parametrize("alias", ["default", "postgres", "mariadb"])
def test_migrations_make_the_columns_and_constraints(alias):
    connection = connections[alias]
    empty = _project()
    with isolate_apps("tests"):

        class Migrated(models.Model):  # noqa: DJ008
            n = models.IntegerField(default=0)

            class Meta:
                app_label = "tests"

        plain = _project(Migrated)
    with isolate_apps("tests"):

        class Migrated(FencedModel, VersionedModel):
            n = models.IntegerField(default=0)

            class Meta:
                app_label = "tests"

        guarded = _project(Migrated)
        assert not _changes(guarded, _project(Migrated))

    def migrate(before, after):
        state = before.clone()
        for migration in _changes(before, after):
            for operation in migration.operations:
                new = state.clone()
                operation.state_forwards("tests", new)
                with connection.schema_editor() as editor:
                    operation.database_forwards("tests", editor, state, new)
                state = new
        assert not _changes(state, after)
        return state.apps.get_model("tests", "Migrated")

    for before in (empty, plain):
        if before is plain:
            migrate(empty, plain)._base_manager.using(alias).create(n=1)
        historical = migrate(before, guarded)
        rows = models.QuerySet(historical, using=alias)
        with connection.cursor() as cursor:  # as code does that doesn't know the columns yet
            cursor.execute("INSERT INTO tests_migrated (n) VALUES (2)")
        assert set(rows.values_list("fence", "version")) == {(0, 0)}
        for column in ("fence", "version"):
            with pytest.raises(DatabaseError, match=f"tests_migrated_{column}_rejected"):
                rows.update(**{column: -1})
        with connection.schema_editor() as editor:
            editor.delete_model(historical)


@pytest.mark.parametrize("before", [(), (Account,)])
def test_migrations_name_nothing_of_the_package(before):
    """They stay when the package is removed from the project, and would fail to import it."""
    after = _project(*before, Invoice, Contract, Truck, m.Vehicle, m.Van, m.Paper, m.Letter)
    changes = _changes(_project(*before), after)
    text = "".join(MigrationWriter(each).as_string() for each in changes)
    assert text.count("models.BigIntegerField(db_default=0)") == 5
    assert text.count("models.CheckConstraint(") == 5
    for word in ("fencedlock", "manager", "bases=(models", "'abstract': True"):
        assert word not in text


@pytest.mark.django_db
def test_a_guarded_save_is_one_short_statement():
    invoice = Invoice.objects.create()
    with invoice.fencing.lock() as lease:
        invoice.refresh_from_db()
        with CaptureQueriesContext(connections["default"]) as captured:
            invoice.save(update_fields=["note"])
    (sent,) = captured
    assert sent["sql"] == (
        'UPDATE "tests_invoice" SET "note" = \'\', "fence" = 1 WHERE '
        f'("tests_invoice"."id" = {invoice.pk} AND "tests_invoice"."fence" IN (0, 1) '
        "AND (SELECT true FROM django_fencedlock_fence WHERE "
        f"name = '{lease.name}' AND token = 1 AND owner = '{lease.owner_id}'))"
    )
