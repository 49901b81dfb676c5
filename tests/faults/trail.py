"""The triggers that write the trail."""

import re
from collections.abc import Iterator
from typing import Any

from django.db import connections

_INTO = "INSERT INTO {trail} (kind, name, {before}, {after}, token, stamp)"
_FUNCTION = """\
CREATE FUNCTION note_{label}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN {statement}; RETURN NULL; END $$"""


def lay(using: str) -> None:
    """Create triggers that record every change of the protected rows and of the fences."""
    with connections[using].cursor() as cursor:
        for statement in _statements(connections[using]):
            cursor.execute(statement)


def _statements(connection: Any) -> Iterator[str]:
    from django_fencedlock.models import Fence

    from .models import PROTECTED, Reading, Trail

    quote = connection.ops.quote_name
    into = _INTO.format(
        trail=quote(Trail._meta.db_table), before=quote("before"), after=quote("after")
    )
    for kind, model in PROTECTED.items():
        token = "NEW.fence" if hasattr(model, "fencing") else "NULL"
        before, after = model.lock_name
        name = f"CONCAT('{before}', NEW.id, '{after}')"
        values = f"'{kind}', {name}, OLD.count, NEW.count, {token}, NEW.stamp"
        yield from _trigger(connection, kind, "UPDATE", model, f"{into} VALUES ({values})")
    values = "'reading', CONCAT('stock:', NEW.stock, ''), NULL, NEW.count, NULL, NEW.stamp"
    yield from _trigger(connection, "reading", "INSERT", Reading, f"{into} VALUES ({values})")
    for event, before in (("INSERT", "NULL"), ("UPDATE", "OLD.token")):
        values = f"'fence', NEW.name, {before}, NEW.token, NEW.token, NEW.owner"
        statement = f"{into} VALUES ({values})"
        yield from _trigger(connection, f"fence_{event.lower()}", event, Fence, statement)


def _trigger(connection: Any, label: str, event: str, model: Any, statement: str) -> Iterator[str]:
    table = connection.ops.quote_name(model._meta.db_table)
    head = f"CREATE TRIGGER note_{label} AFTER {event} ON {table} FOR EACH ROW"
    if connection.vendor == "postgresql":
        yield _FUNCTION.format(label=label, statement=statement)
        yield f"{head} EXECUTE FUNCTION note_{label}()"
    elif connection.vendor == "mysql":
        yield f"{head} {statement}"
    else:
        # Older ones have no CONCAT.
        statement = re.sub(r"CONCAT\((.*?), (.*?), (.*?)\)", r"\1 || \2 || \3", statement)
        yield f"{head} BEGIN {statement}; END"
