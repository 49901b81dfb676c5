import subprocess
import sys

import pytest
from django.contrib.auth.models import Group
from django.db import OperationalError, connections

_ALIASES = ["default", "postgres", "mariadb"]
_COUNT = """
import sys
import django
django.setup()
from django.contrib.auth.models import Group
print(Group.objects.using(sys.argv[1]).count())
"""


@pytest.mark.parametrize(
    "alias",
    [
        pytest.param(alias, marks=pytest.mark.django_db(transaction=True, databases=[alias]))
        for alias in _ALIASES
    ],
)
def test_child_process_sees_what_the_test_has_committed(alias, child_environment):
    Group.objects.using(alias).create(name="of the test")
    command = [sys.executable, "-c", _COUNT, alias]
    assert subprocess.check_output(command, env=child_environment(), cwd="/") == b"1\n"


@pytest.mark.django_db
def test_sqlite_is_a_file_with_a_write_ahead_log():
    with connections["default"].cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        assert cursor.fetchone() == ("wal",)


@pytest.mark.django_db
def test_database_of_the_tests_own_may_be_killed(make_alias, make_postgres):
    server = make_postgres()
    groups = Group.objects.using(make_alias(server.django()))
    groups.create(name="kept")
    server.kill()
    with pytest.raises(OperationalError):
        groups.count()
    server.start()
    connections[groups.db].close()
    assert groups.count() == 1
