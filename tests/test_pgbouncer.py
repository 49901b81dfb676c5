"""Locks and fenced writes where the database is behind a PgBouncer that pools transactions."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core import checks
from django.db import connections

from tests.backends import POSTGRES
from tests.models import Invoice

THREADS, TIMES = 4, 15


@pytest.fixture
def aliases(make_postgres, make_pgbouncer, make_alias):
    server = make_postgres()
    pooler = make_pgbouncer(server, pool_mode="transaction", pool_size=2)
    entry = server.django(by=pooler)
    entry["DISABLE_SERVER_SIDE_CURSORS"] = True
    return make_alias(server.django()), make_alias(entry)


@pytest.mark.parametrize("session_locks", [False, True], ids=["database", "postgres"])
@pytest.mark.django_db(transaction=True)
def test_no_update_is_lost_through_a_pooler(aliases, settings, session_locks):
    direct, pooled = aliases
    entry = {"FENCE_DATABASE": pooled, "BLOCKING_TIMEOUT": 60}
    if session_locks:
        entry |= {"BACKEND": POSTGRES, "OPTIONS": {"DATABASE": direct}}
    settings.FENCEDLOCK = {"default": entry}
    found = checks.run_checks(databases=[pooled], tags=[checks.Tags.database])
    assert [each for each in found if str(each.id).startswith("django_fencedlock.")] == []

    pk = Invoice.objects.using(pooled).create(amount=0).pk

    def add(number):
        try:
            for _ in range(TIMES):
                with Invoice.fencing.lock(pk=pk) as lease:
                    invoice = Invoice.objects.using(pooled).get(pk=pk)
                    invoice.amount += 1
                    if number % 2:
                        invoice.save()
                        continue
                    with lease.atomic(using=pooled):
                        invoice.save()
        finally:
            connections[pooled].close()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(add, range(THREADS)))
    invoice = Invoice.objects.using(pooled).get(pk=pk)
    assert (invoice.amount, invoice.fence) == (THREADS * TIMES, THREADS * TIMES)
    connections[pooled].close()
