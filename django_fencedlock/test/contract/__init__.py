"""
The tests that every lock backend passes, also one of your own.

Subclass the parts for your backend's capabilities, and name its alias::

    @pytest.mark.django_db(transaction=True)
    class TestMyBackend(LockContract, ExpiryContract, WaitingContract):
        alias = "mine"

`LockContract` is for all backends, `ExpiryContract` for those with ``supports_ttl``,
`WaitingContract` for those with ``supports_waiting``, and `SharedContract` for those with
``supports_shared``; a test fails if one is missing.
`OutageContract` and `DataLossContract` need hooks that stop and empty the service.

A subclass may override the fixture ``prepared`` (a service or settings for each test),
``interrupt_holder()`` (required where locks live as long as a session), and ``waiters()`` of
`WaitingContract`, which makes its tests faster. Child processes get ``DJANGO_SETTINGS_MODULE`` and
the databases, ``CACHES`` and ``FENCEDLOCK`` of the test.

The tests need real transactions, not ``TestCase``: grants are recorded in transactions of their
own. A test sleeps only if time is its subject, and then for about a second.
"""

import pytest

# Before the import: then a failing assert shows its values.
_PARTS = (
    "base",
    "dying",
    "exclusion",
    "forcing",
    "holding",
    "losing",
    "naming",
    "outages",
    "paths",
    "permits",
    "sets",
    "sharing",
    "transactions",
    "waiting",
)
for _part in _PARTS:
    pytest.register_assert_rewrite(f"{__name__}.{_part}")

from .base import Contract  # noqa: E402
from .dying import DeathContract  # noqa: E402
from .exclusion import ExclusionContract  # noqa: E402
from .forcing import ForcedReleaseContract  # noqa: E402
from .holding import HoldingContract  # noqa: E402
from .losing import ExpiryContract, LossContract  # noqa: E402
from .naming import NameContract  # noqa: E402
from .outages import DataLossContract, OutageContract  # noqa: E402
from .permits import PermitContract  # noqa: E402
from .sets import SetContract  # noqa: E402
from .sharing import SharedContract  # noqa: E402
from .transactions import TransactionContract  # noqa: E402
from .waiting import WaitingContract  # noqa: E402

__all__ = [
    "Contract",
    "DataLossContract",
    "ExpiryContract",
    "LockContract",
    "OutageContract",
    "SharedContract",
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
    SetContract,
    PermitContract,
):
    """The tests for every backend."""

    def test_each_capability_of_the_backend_is_tested(self) -> None:
        backend = self.service.backend
        assert backend.supports_ttl == isinstance(self, ExpiryContract)
        assert backend.supports_waiting == isinstance(self, WaitingContract)
        assert backend.supports_shared == isinstance(self, SharedContract)
