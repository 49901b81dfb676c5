"""The acceptance of MySQL's session locks. Children of test_mysql_backend.py import no models."""

import pytest

from tests.backends import MYSQL
from tests.services import ServiceAcceptance

pytestmark = pytest.mark.slow


@pytest.mark.django_db(transaction=True, databases=["default", "mariadb"])
class TestAcceptance(ServiceAcceptance):
    backend = MYSQL
    database = "mariadb"
    # It is the fence database: its outage is in tests/test_contract.py.
    test_a_leader_is_killed_under_load = None
    test_a_server_that_starts_empty = None
    test_no_quorum_is_an_error_in_time_and_leaves_nothing_locked = None
    test_lost_and_late_answers = None
    # Its driver blocks.
    keeps_beside_greenlet = False

    def location(self, *addresses):
        return ""

    @pytest.fixture
    def servers(self, mariadb):
        return []
