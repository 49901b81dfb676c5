"""Mutations of forced release, and of lifting fences after a restore."""

# ruff: noqa: E501 - quoted code is as long as it is
from __future__ import annotations

from .mutation import Mutation

_FORCING = "tests/test_releasing.py"
_RESYNC = "tests/test_resync.py"


def _contract(service: str, test: str) -> str:
    return f"tests/test_contract.py::{service}::test_{test}"


_BLOCKED = "an_open_transaction_under_the_lease_is_in_the_way_and_named"
_HIS_MOMENT = "a_lock_that_changes_hands_at_that_moment_is_left_alone"
_NO_WAY_BACK = "an_evicted_keeper_does_not_renew_its_way_back"

MUTATIONS = (
    Mutation(
        "The lock is freed first, and its fence lifted afterwards",
        "releasing.py",
        "    revoked = _revoke(found, by)\n"
        "    taken = service(found.alias).backend.take_away(\n"
        "        found.name, found.owner, token=revoked.token if revoked else None\n"
        "    )\n",
        "    taken = service(found.alias).backend.take_away(\n"
        "        found.name, found.owner, token=found.holder.token\n"
        "    )\n"
        "    revoked = _revoke(found, by)\n",
        (
            _contract("TestDatabaseOnSQLite", _BLOCKED),
            _contract("TestDatabaseOnPostgres", _BLOCKED),
            _contract("TestRedis", _BLOCKED),
        ),
    ),
    Mutation(
        "A forced release frees the lock, and lifts no fence",
        "fences/revoking.py",
        '    if not given["fenced"]:\n        return False, None\n',
        "    if given:\n        return False, None\n",
        (_FORCING,),
    ),
    Mutation(
        "A claim that reaches the database twice undoes the lift",
        "releasing.py",
        "    if revoked is not None and found.fenced and taken is Taken.FREED:\n",
        "    if revoked is None and found.fenced and taken is Taken.FREED:\n",
        (_FORCING,),
    ),
    Mutation(
        "The fence is lifted to its holder's token, and not above",
        "fences/revoking.py",
        "THEN %(seen)s ELSE token END + 1, owner = ''",
        "THEN %(seen)s ELSE token END, owner = ''",
        (_FORCING,),
    ),
    Mutation(
        "A lifted fence keeps its former owner",
        "fences/revoking.py",
        "ELSE token END + 1, owner = ''",
        "ELSE token END + 1",
        (_FORCING, _contract("TestDatabaseOnSQLite", "twice_is_as_good_as_once")),
    ),
    Mutation(
        "A newer grant is fenced off along with the one that was meant",
        "fences/revoking.py",
        "WHERE name = %(name)s AND (owner = %(owner)s OR token < %(seen)s)",
        "WHERE name = %(name)s",
        (_FORCING, _contract("TestDatabaseOnSQLite", _HIS_MOMENT)),
    ),
    Mutation(
        "A holder who is about to record his grant is above the lifted fence",
        "fences/revoking.py",
        "AND (owner = %(owner)s OR token < %(seen)s)",
        "AND owner = %(owner)s",
        (_FORCING,),
    ),
    Mutation(
        "A fence that isn't there yet isn't made",
        "fences/revoking.py",
        '    if found is None and given["seen"]:\n',
        "    if given is None:\n",
        (_FORCING,),
    ),
    Mutation(
        "A note is deleted while its holder may come back",
        "fences/revoking.py",
        """ AND NOT EXISTS "
        f"(SELECT 1 FROM {HELD} h WHERE h.owner = {FORCED}.owner)\"""",
        '"',
        (_FORCING,),
    ),
    Mutation(
        "Notes of forced releases are kept for ever",
        "releasing.py",
        "        _tidy(found)\n",
        "",
        (_FORCING,),
    ),
    Mutation(
        "Another holder than the one that was meant loses the lock",
        "releasing.py",
        "    if owner is not None and owner != found.owner:",
        "    if owner is None and owner != found.owner and not found:",
        (_contract("TestDatabaseOnSQLite", "a_lock_that_has_changed_hands_is_left_alone"),),
    ),
    Mutation(
        "Who drew a newer token at that very moment keeps it",
        "releasing.py",
        "        if again is not None and again.owner == found.owner:",
        "        if again is None:",
        (_FORCING,),
    ),
    Mutation(
        "The lock is freed though its fence couldn't be lifted",
        "releasing.py",
        "        if found.fenced or not is_table_missing(cause):\n            raise\n",
        "",
        (_FORCING,),
    ),
    Mutation(
        "The keeper of a session lock that was taken away goes on renewing it",
        "backends/postgres_statements.py",
        "k.key IS NOT NULL AS held, r.owner IS NOT NULL AS forced",
        "k.key IS NOT NULL AS held, false AS forced",
        (_contract("TestPostgres", _NO_WAY_BACK),),
    ),
    Mutation(
        "Redis: whoever has the lock by now loses it to a forced release",
        "backends/redis_scripts.py",
        "{_MINE}\nif held and not mine then return 0 end\nif ARGV[2] ~= '0' then",
        "{_MINE}\nif ARGV[2] ~= '0' then",
        (_contract("TestRedis", _HIS_MOMENT),),
    ),
    Mutation(
        "Redis: a holder renews what was taken away from him",
        "backends/redis_scripts.py",
        "  if drawn < tonumber(ARGV[2]) then\n    redis.call('SET', KEYS[2], ARGV[2] .. ':', 'PX', {_SEQ_TTL})\n  end\n",
        "",
        ("tests/test_redis_backend.py::test_what_is_taken_away_has_its_counter_lifted",),
    ),
    Mutation(
        "Redis: the lock of one who drew a newer token meanwhile is freed unfenced",
        "backends/redis_scripts.py",
        "  if mine and tonumber(string.match(held, ':(%d+):')) > tonumber(ARGV[2]) then return 0 end\n",
        "",
        (_FORCING,),
    ),
    Mutation(
        "After a restore a fence is lifted to the row's token, and not above",
        "fences/lifting.py",
        '"token": highest[name] + 1}',
        '"token": highest[name]}',
        (_RESYNC,),
    ),
    Mutation(
        "After a restore a fence is lowered that a grant has raised meanwhile",
        "fences/lifting.py",
        "WHERE name = %(name)s AND token < %(highest)s\n",
        "WHERE name = %(name)s AND %(highest)s > 0\n",
        (_RESYNC,),
    ),
    Mutation(
        "Of many rows under one name the last one counts, and not the highest",
        "resync.py",
        "                highest[name] = max(token, highest.get(name, 0))",
        "                highest[name] = token",
        (_RESYNC,),
    ),
)
