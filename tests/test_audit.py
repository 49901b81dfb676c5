"""`assert_all_writes_fenced()` finds exactly the writes that no lease covers."""

import contextlib

import pytest
from django.db import connections, models, transaction
from psycopg import sql

from django_fencedlock import lock
from django_fencedlock.test.audit import assert_all_writes_fenced, writes_in
from tests.models import Account, Contract, Invoice

ALIASES = [
    pytest.param(alias, marks=pytest.mark.django_db(transaction=True, databases=["default", alias]))
    for alias in ("default", "postgres", "mariadb")
]
ON_POSTGRES_ALONE = pytest.mark.parametrize("alias", ALIASES[1:2], indirect=True)


@pytest.fixture(params=ALIASES)
def alias(request, settings):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": request.param}}
    return request.param


@pytest.fixture
def invoice(alias):
    return Invoice.objects.using(alias).create(account=Account.objects.using(alias).create())


@contextlib.contextmanager
def caught(*words):
    with pytest.raises(AssertionError) as failure, assert_all_writes_fenced():
        yield
    for word in words:
        assert word in str(failure.value)


def execute(alias, statement, *given):
    with connections[alias].cursor() as cursor:
        cursor.execute(statement, given)


def upsert(alias, pk):
    conflicts = {"update_conflicts": True, "update_fields": ["amount"]}
    if connections[alias].vendor != "mysql":
        conflicts["unique_fields"] = ["id"]
    Invoice.objects.using(alias).bulk_create([Invoice(pk=pk, amount=3)], **conflicts)


class TestFenced:
    def test_writes_through_the_model_under_its_lease(self, alias, invoice):
        rows = Invoice.objects.using(alias)
        with assert_all_writes_fenced(), Invoice.fencing.lock(pk=invoice.pk):
            invoice.save()
            invoice.save(update_fields=["note"])
            rows.filter(pk=invoice.pk).update(amount=1)
            row = rows.get(pk=invoice.pk)
            row.amount = 2
            rows.bulk_update([row], ["amount"])
            rows.get(pk=invoice.pk).save()
            rows.filter(pk=invoice.pk).delete()
        other = rows.create()
        with assert_all_writes_fenced(), other.fencing.lock():
            other.delete()

    def test_new_rows_that_need_no_lease_and_an_upsert_under_one(self, alias, invoice):
        with assert_all_writes_fenced():
            Invoice.objects.using(alias).create()
            Invoice.objects.using(alias).bulk_create([Invoice(), Invoice()])
            Invoice.objects.using(alias).bulk_create([Invoice()], ignore_conflicts=True)
            with Invoice.fencing.lock(pk=invoice.pk):
                upsert(alias, invoice.pk)
        invoice.refresh_from_db()
        assert invoice.amount == 3

    def test_cascades_under_the_lease(self, alias, invoice):
        with assert_all_writes_fenced(), Invoice.fencing.lock(pk=invoice.pk):
            Account.objects.using(alias).all().delete()

    def test_raw_sql_and_the_like_inside_lease_atomic(self, alias, invoice):
        with assert_all_writes_fenced(), lock("nightly") as lease, lease.atomic(using=alias):
            execute(alias, "UPDATE tests_invoice SET amount = 1")
            models.QuerySet(Invoice, using=alias).update(amount=2)

    def test_reads_and_tables_that_are_not_fenced(self, alias, invoice):
        with assert_all_writes_fenced():
            Account.objects.using(alias).update(balance=1)
            with transaction.atomic(using=alias):
                list(Invoice.objects.using(alias).select_for_update())

    def test_a_statement_that_failed_wrote_nothing(self, alias, invoice):
        with assert_all_writes_fenced(), pytest.raises(Exception, match=r"no_such|Unknown column"):
            execute(alias, "UPDATE tests_invoice SET no_such = 1")


class TestUnfenced:
    def test_raw_sql_is_named_with_its_table(self, alias, invoice):
        with caught("1 writes", "tests_invoice, bypasses the fenced model", "SET amount = 1"):
            execute(alias, "UPDATE tests_invoice SET amount = 1")

    def test_raw_sql_under_a_lease_but_outside_of_its_atomic(self, alias, invoice):
        with caught("bypasses the fenced model"), Invoice.fencing.lock(pk=invoice.pk):
            invoice.save()
            execute(alias, "UPDATE tests_invoice SET amount = 1, fence = fence")

    def test_a_queryset_that_is_not_fenced(self, alias, invoice):
        with caught("3 writes"):
            models.QuerySet(Invoice, using=alias).update(amount=1)
            models.QuerySet(Invoice, using=alias).bulk_create([Invoice()])
            models.QuerySet(Invoice, using=alias)._raw_delete(alias)

    def test_writes_that_without_lock_allows(self, alias, invoice, settings):
        settings.FENCEDLOCK_WITHOUT_LOCK = "allow"
        with caught("1 writes", "without a lease"):
            upsert(alias, invoice.pk)
        with caught("4 writes", "tests_invoice, without a lease", "DELETE FROM"):
            invoice.save()
            Invoice.objects.using(alias).update(amount=1)
            invoice.delete()
            Invoice.objects.using(alias).create().delete()

    @ON_POSTGRES_ALONE
    @pytest.mark.parametrize(
        "statement",
        [
            "WITH x AS (UPDATE tests_invoice SET amount = 1 RETURNING id) SELECT * FROM x",
            sql.SQL("DELETE FROM {}").format(sql.Identifier("tests_invoice")),
        ],
        ids=["common table expression", "composed"],
    )
    def test_statements_of_postgres(self, alias, invoice, statement):
        with caught("tests_invoice"):
            execute(alias, statement)

    def test_many_at_once(self, alias, invoice):
        with caught("tests_invoice"), connections[alias].cursor() as cursor:
            cursor.executemany("UPDATE tests_invoice SET amount = %s", [(1,), (2,)])

    def test_the_error_of_the_block_comes_first(self, alias, invoice):
        with pytest.raises(ZeroDivisionError), assert_all_writes_fenced():
            execute(alias, "UPDATE tests_invoice SET amount = 1")
            raise ZeroDivisionError

    def test_statements_after_the_block_are_not_seen(self, alias, invoice):
        with assert_all_writes_fenced() as found:
            pass
        execute(alias, "UPDATE tests_invoice SET amount = 1")
        assert found == []
        assert not connections[alias].execute_wrappers


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("INSERT INTO t (a) VALUES (1)", "INSERT t"),
        ('INSERT INTO "public"."t" (a) SELECT a FROM u', "INSERT t"),
        ("INSERT OR REPLACE INTO t VALUES (1)", "INSERT t"),
        ("insert ignore t values (1)", "INSERT t"),
        ("REPLACE INTO t VALUES (1)", "REPLACE t"),
        ("UPDATE ONLY t AS x SET a = 1 FROM u", "UPDATE t x"),
        ("UPDATE `t` JOIN `u` ON t.a = u.a SET t.a = 1", "UPDATE t u"),
        ("WITH x AS (SELECT 1) UPDATE t SET a = 1", "UPDATE t"),
        (
            "WITH x AS (DELETE FROM t RETURNING *) INSERT INTO u SELECT * FROM x",
            "DELETE t INSERT u",
        ),
        ("WITH x AS (DELETE FROM t) SELECT * FROM u", "DELETE t"),
        ("DELETE FROM t USING u WHERE t.a = u.a", "DELETE t"),
        ("DELETE t FROM t JOIN u ON t.a = u.a WHERE u.b", "DELETE t u"),
        ("TRUNCATE TABLE ONLY t, u RESTART IDENTITY", "TRUNCATE t u"),
        ("MERGE INTO t USING u ON t.a = u.a WHEN MATCHED THEN UPDATE SET a = 1", "MERGE t"),
        ("COPY (SELECT a FROM t) TO STDOUT", ""),
        ("LOAD DATA INFILE 'x' INTO TABLE t", "LOAD t"),
        ("SELECT 1; UPDATE t SET a = 1; SELECT 2", "UPDATE t"),
        ("EXPLAIN ANALYZE DELETE FROM t", "DELETE t"),
        ("DO $$ BEGIN UPDATE t SET a = 1; END $$", "UPDATE t"),
        ("/* a comment */ -- another\n UPDATE t SET a = 1", "UPDATE t"),
        ("SELECT 'UPDATE t SET a = 1', 'it''s; DELETE FROM t'", ""),
        ("SELECT * FROM t FOR NO KEY UPDATE", ""),
        ("SELECT * FROM t FOR UPDATE OF t", ""),
        ("SELECT replace(a, 'x', 'y'), copy FROM t", ""),
        ("INSERT INTO u (a) VALUES (1) ON CONFLICT (a) DO UPDATE SET a = 1", "INSERT u"),
        ("INSERT INTO u (a) VALUES (1) ON DUPLICATE KEY UPDATE a = 1", "INSERT u"),
        ("CREATE TABLE u (a int REFERENCES t (a) ON DELETE CASCADE ON UPDATE CASCADE)", ""),
    ],
)
def test_the_tables_that_a_statement_writes_to(statement, expected):
    told = {}
    for verb, table in writes_in(statement):
        told.setdefault(verb, []).append(table)
    tables = {verb: [t for t in told[verb] if t in "tux"] for verb in told}
    assert " ".join(" ".join([verb, *found]) for verb, found in tables.items()) == expected


@pytest.mark.django_db
def test_a_model_with_a_version_as_well():
    with assert_all_writes_fenced():
        row = Contract.objects.create()
        with row.fencing.lock():
            row.save()
