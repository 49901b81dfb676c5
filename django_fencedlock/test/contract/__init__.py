"""
What every lock backend has to do, as tests to run over a backend of your own.

Subclass the parts that your backend has the capability for, name the alias, and let pytest collect
the result::

    @pytest.mark.django_db(transaction=True)
    class TestMyBackend(LockContract, ExpiryContract, WaitingContract):
        alias = "mine"

`LockContract` is for all. `ExpiryContract` is for backends with ``supports_ttl``, `WaitingContract`
for those with ``supports_waiting``; a test says if one is missing. `OutageContract` and
`DataLossContract` want hooks, which stop and empty the service.

What a subclass may override is on `Contract`: the fixture ``prepared`` (a service or settings for
each test), ``interrupt_holder()`` (needed where leases live as long as a session), and in
`WaitingContract` ``waiters()``, which makes it faster. Children of the tests are set up with
``DJANGO_SETTINGS_MODULE``, and with the databases, ``CACHES`` and ``FENCEDLOCK`` of the test.

Grants are recorded in transactions of their own, so the tests need real ones (no ``TestCase``).
A test sleeps only where time itself is its subject, and then for about a second.
"""

import pytest

# Before they are imported: then a failing assert tells its values.
_PARTS = (
    "base",
    "dying",
    "exclusion",
    "forcing",
    "holding",
    "losing",
    "outages",
    "transactions",
    "waiting",
)
for _part in _PARTS:
    pytest.register_assert_rewrite(f"{__name__}.{_part}")

from .base import Contract  # noqa: E402
from .dying import DeathContract  # noqa: E402
from .exclusion import ExclusionContract  # noqa: E402
from .forcing import ForcedReleaseContract  # noqa: E402
from .holding import HoldingContract, NameContract  # noqa: E402
from .losing import ExpiryContract, LossContract  # noqa: E402
from .outages import DataLossContract, OutageContract  # noqa: E402
from .transactions import TransactionContract  # noqa: E402
from .waiting import WaitingContract  # noqa: E402

__all__ = [
    "Contract",
    "DataLossContract",
    "ExpiryContract",
    "LockContract",
    "OutageContract",
    "WaitingContract",
]


class LockContract(
    ExclusionContract,
    HoldingContract,
    NameContract,
    LossContract,
    DeathContract,
    ForcedReleaseContract,
    TransactionContract,
):
    """What every backend has to do."""

    def test_each_capability_of_the_backend_is_tested(self) -> None:
        backend = self.service.backend
        assert backend.supports_ttl == isinstance(self, ExpiryContract)
        assert backend.supports_waiting == isinstance(self, WaitingContract)
