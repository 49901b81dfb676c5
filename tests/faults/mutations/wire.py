"""Mutations of what goes to the servers and comes back: lines, prepared statements, the trigger."""

# ruff: noqa: E501 - quoted code is as long as it is
from __future__ import annotations

from .mutation import Mutation

_LINES = "tests/test_redis_lines.py"
_PREPARED = "tests/test_prepared.py"
_TRIGGER = "tests/test_operations.py"

MUTATIONS = (
    Mutation(
        "Of many answers those after an error are left to whoever asks next",
        "backends/redis_lines.py",
        "            found.append(exc)\n",
        "            found.append(exc)\n            break\n",
        (_LINES,),
    ),
    Mutation(
        "Many answers come in the wrong order",
        "backends/redis_lines.py",
        "            found.append(exc)\n    return found\n",
        "            found.append(exc)\n    return found[::-1]\n",
        (_LINES,),
    ),
    Mutation(
        "An answer that nobody read is the next request's",
        "backends/redis_lines.py",
        "            if not done:\n                connection.disconnect()\n",
        "",
        (_LINES,),
    ),
    Mutation(
        "Two threads ask on one connection at once",
        "backends/redis_lines.py",
        "            connection = self._idle.pop()\n",
        "            connection = self._idle[-1]\n",
        (_LINES,),
    ),
    Mutation(
        "The length of an argument is that of its characters, and not of its bytes",
        "backends/redis_lines.py",
        '        texts = [text.encode().decode("latin-1") for text in texts]\n',
        "        pass\n",
        (_LINES,),
    ),
    Mutation(
        "An error that the server tells costs the connection",
        "backends/redis_lines.py",
        "            done = not self._leads_astray(exc)\n",
        "            done = False\n",
        (_LINES,),
    ),
    Mutation(
        "Connections to a former primary are kept",
        "backends/redis_lines.py",
        "            done = not self._leads_astray(exc)\n",
        "            done = True\n",
        (_LINES,),
    ),
    Mutation(
        "Connections to a former primary are kept, if it was a batch that met it",
        "backends/redis_lines.py",
        "            if isinstance(answer, ResponseError) and self._leads_astray(answer):\n",
        "            if answer is self:\n",
        (_LINES,),
    ),
    Mutation(
        "What leads to Sentinels' former primary isn't dropped",
        "backends/redis_lines.py",
        "    plain = type(pool) is ConnectionPool\n",
        "    plain = isinstance(pool, ConnectionPool)\n",
        (_LINES,),
    ),
    Mutation(
        "A statement fails for good after a migration changed its table",
        "sessions.py",
        "            if was_idle and prepared.is_outdated(connection, exc):\n"
        "                raise _DeadWhileIdle from exc\n",
        "",
        (_PREPARED,),
    ),
    Mutation(
        "A statement fails that a pooler sends to a session where it wasn't prepared",
        "sessions.py",
        "            if prepared.met_another_session(connection, exc):\n",
        "            if prepared is None:\n",
        (_PREPARED,),
    ),
    Mutation(
        "Statements are prepared through a pooler",
        "prepared.py",
        "    return bool(pid == raw.info.backend_pid)",
        "    return bool(pid)",
        (_PREPARED,),
    ),
    Mutation(
        "Errors of a prepared statement are the driver's",
        "libpq.py",
        "        with self._errors:\n            self._execute(statement, given)\n",
        "        self._execute(statement, given)\n",
        (_PREPARED,),
    ),
    Mutation(
        "A cursor that prepares doesn't know what an engine does to its sessions",
        "prepared.py",
        "    with connection.cursor() as first:\n        raw: Any = connection.connection\n",
        "    raw: Any = connection.connection\n    with raw.cursor() as first:\n",
        (_PREPARED,),
    ),
    Mutation(
        "Trigger: raw SQL lowers a fence",
        "operations.py",
        """parts = [f'NEW."{self.fence}" < OLD."{self.fence}"'] if self.fence else []""",
        """parts = [f'NEW."{self.fence}" < 0'] if self.fence else []""",
        (_TRIGGER,),
    ),
    Mutation(
        "Trigger: raw SQL changes a row and keeps its version",
        "operations.py",
        """NEW."{self.version}" <= OLD."{self.version}"'""",
        """NEW."{self.version}" < OLD."{self.version}"'""",
        (_TRIGGER,),
    ),
    Mutation(
        "Trigger: a row can't be given to another lock",
        "operations.py",
        "        SELECT FROM unnest(naming) AS name WHERE before -> name IS DISTINCT FROM after -> name\n",
        "        SELECT FROM unnest(naming) AS name WHERE false\n",
        (_TRIGGER,),
    ),
    Mutation(
        "Trigger: a row whose key is changed may lower its fence, whatever names its lock",
        "operations.py",
        "    naming text[] := CASE WHEN TG_NARGS > 2 THEN TG_ARGV[2:] ELSE keys END;",
        "    naming text[] := keys || TG_ARGV[2:];",
        (_TRIGGER,),
    ),
    Mutation(
        "Trigger: the function goes with the first trigger that is dropped",
        "operations.py",
        'f"DO $fencedlock$ BEGIN IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgfoid = "\n'
        "        f\"to_regproc('{NAME}')) THEN DROP FUNCTION IF EXISTS {NAME}(); END IF; END $fencedlock$\"",
        'f"DROP FUNCTION IF EXISTS {NAME}() CASCADE"',
        (_TRIGGER,),
    ),
    Mutation(
        "Trigger: it is made on tables that the router put elsewhere",
        "operations.py",
        "        return model if self.allow_migrate_model(connection.alias, model) else None",
        "        return model",
        (_TRIGGER,),
    ),
)
