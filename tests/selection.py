"""
Select the tests that use a server, to repeat them on other servers: pytest -p tests.selection.

These are the tests that the run before skipped, since a program was missing, and every test that
reaches a server through a fixture, a database alias, or its module.
"""

import functools
import inspect
import re
from typing import Any

import pytest

from tests.conftest import SKIPPED, aliases

_SERVER = re.compile(
    r"^(make_|shared_|some_)?(postgres|redis|valkey|mariadb|pgbouncer|rabbitmq|browser|worker|broker"
    r"|etcd|zookeeper|consul|dynamodb|mysql|redlock)"
)
#: What a test that asks for a server in its body has in its module.
_ASKS = re.compile(r"getfixturevalue|\bshared\.\w+\(\)|\bfinding\.\w+\(\)|\.launch\(")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cache = getattr(config, "cache", None)
    skipped = set(cache.get(SKIPPED, [])) if cache else set()
    chosen = [item for item in items if item.nodeid in skipped or _uses_server(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def _uses_server(item: Any) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    if aliases(item) - {"default"} or any(map(_SERVER.search, fixtures)):
        return True
    return "request" in fixtures and _asks(item.module)


@functools.cache
def _asks(module: Any) -> bool:
    return bool(_ASKS.search(inspect.getsource(module)))
