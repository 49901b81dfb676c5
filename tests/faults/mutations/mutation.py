"""What a mutation of the package's source is, and the tests that may notice one."""

from __future__ import annotations

from dataclasses import dataclass

ON_SQLITE = "tests/test_contract.py::TestDatabaseOnSQLite"
ON_POSTGRES = "tests/test_contract.py::TestDatabaseOnPostgres"
ON_MARIADB = "tests/test_contract.py::TestDatabaseOnMariaDB"
SESSION_LOCKS = "tests/test_contract.py::TestPostgres"
REDIS = "tests/test_contract.py::TestRedis"


@dataclass(frozen=True)
class Mutation:
    """
    One change to one file that breaks one promise.

    Args:
        what: What is broken, in words.
        file: The file, from the package's directory on.
        old: What is there. Found exactly once.
        new: What takes its place.
        tests: What pytest is given. The first that fails has caught it.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
