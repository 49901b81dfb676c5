"""A fence never goes down, though a row's may be above the lease's token."""

import pytest

from django_fencedlock import StaleFence, lock
from tests.models import Invoice

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres"])


@pytest.fixture(params=["default", "postgres"])
def database(request, settings):
    settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": request.param}}
    return request.param


@pytest.fixture
def ahead(database):
    """A row written under token 1000, of whose fence the database knows nothing (any more)."""
    with lock("other"):
        invoice = Invoice(amount=1)
        invoice.save(using=database)
    rows = Invoice._base_manager.using(database).filter(pk=invoice.pk)
    super(type(rows), rows)._update([(Invoice._meta.get_field("fence"), None, 1000)])
    return Invoice.objects.using(database).get(pk=invoice.pk)


@pytest.mark.parametrize("write", ["save", "delete"])
def test_a_row_of_a_higher_fence_is_refused(database, ahead, write):
    with Invoice.fencing.lock(pk=ahead.pk) as lease:
        assert lease.token == 1
        with pytest.raises(StaleFence, match="token 1000 already"):
            getattr(ahead, write)()
    assert Invoice.objects.using(database).get(pk=ahead.pk).fence == 1000
