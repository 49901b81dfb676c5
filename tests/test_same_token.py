"""A token that was handed out again (a crash, a restored backup) still has one owner."""

import pytest

from django_fencedlock import StaleFence
from django_fencedlock.models import Fence
from tests.models import Account, LedgerLine

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres"])


@pytest.fixture(params=["default", "postgres"])
def database(request, settings):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": request.param}}
    return request.param


def in_one_transaction(lease, line):
    with lease.atomic():
        pytest.fail("the block was entered")


WRITES = {
    "save": lambda lease, line: line.save(),
    "delete": lambda lease, line: line.delete(),
    "update": lambda lease, line: LedgerLine.objects.using(lease.database).update(amount=7),
    "insert": lambda lease, line: LedgerLine(account=line.account).save(using=lease.database),
    "atomic": in_one_transaction,
}


@pytest.mark.parametrize("other", [{"owner": "f" * 32}, {"token": 9}], ids=["owner", "token"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_needs_the_fences_token_and_its_owner(database, write, other):
    account = Account.objects.using(database).create()
    with LedgerLine.fencing.lock(account=account) as lease:
        line = LedgerLine(account=account, amount=1)
        line.save(using=database)
        Fence.objects.using(database).filter(name=lease.name).update(**other)
        with pytest.raises(StaleFence):
            write(lease, line)
    assert [each.amount for each in LedgerLine.objects.using(database).all()] == [1]
