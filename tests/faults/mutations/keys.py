"""Mutations of single comparisons in the statements of session locks, and of what goes with them."""

# ruff: noqa: E501 - quoted code is as long as it is
from __future__ import annotations

from .mutation import SESSION_LOCKS, Mutation

_SQL = "backends/postgres_statements.py"
_ROOMS = "tests/test_session_rooms.py"
_BACKEND = "tests/test_postgres_backend.py"
_GRANTS = f"{_BACKEND}::TestGrants"
_HUNG = (f"{_ROOMS}::TestHungHolders", f"{_BACKEND}::TestHungHolders")
_FORCING = "tests/test_releasing.py"
_ALL = (_ROOMS, _GRANTS)


def _contract(*tests: str) -> tuple[str, ...]:
    return tuple(f"{SESSION_LOCKS}::test_{test}" for test in tests)


_DEAD = (
    _ROOMS,
    f"{_BACKEND}::TestProcesses",
    *_contract(
        "evicting_frees_the_lock_of_a_killed_process", "evicting_frees_no_lock_of_somebody_else"
    ),
)
_FORCED = (
    _FORCING,
    *_contract(
        "the_keeper_tells_the_holder_who_did_it",
        "a_release_after_it_is_told_as_well",
        "verifying_tells_it",
        "a_lock_that_is_not_fenced",
        "a_lock_that_has_changed_hands_is_left_alone",
        "a_lock_that_changes_hands_at_that_moment_is_left_alone",
        "a_stopped_process_loses_it_and_learns_it",
        "a_row_whose_lock_is_gone_goes_too",
        "twice_is_as_good_as_once",
    ),
)

MUTATIONS = (
    Mutation(
        "Session locks: who waits for a lock counts as its holder",
        _SQL,
        "l.objsubid = 1 AND l.granted\n",
        "l.objsubid = 1\n",
        _ALL,
    ),
    Mutation(
        "Session locks: a lock of another database on the server counts as this one's",
        _SQL,
        "l.objsubid = 1 AND l.granted\n    AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()))",
        "l.objsubid = 1 AND l.granted)",
        _ALL,
    ),
    Mutation(
        "Session locks: a lock of two 32-bit keys counts as one of 64 bits",
        _SQL,
        "l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted",
        "l.locktype = 'advisory' AND l.granted",
        _ALL,
    ),
    Mutation(
        "Session locks: a grant is recorded without the lock",
        _SQL,
        "(SELECT clock_timestamp() AS now WHERE l.ok) c",
        "(SELECT clock_timestamp() AS now) c",
        (_GRANTS,),
    ),
    Mutation(
        "Session locks: a row of another lock service that ran out refuses the lock for ever",
        _SQL,
        "    WHERE h.expires_at <= clock_timestamp()\n    OR (h.alias = EXCLUDED.alias",
        "    WHERE (h.alias = EXCLUDED.alias",
        _ALL,
    ),
    Mutation(
        "Session locks: the row of another alias is taken from its live holder",
        _SQL,
        "OR (h.alias = EXCLUDED.alias AND h.backend = EXCLUDED.backend)",
        "OR (h.backend = EXCLUDED.backend)",
        _ALL,
    ),
    Mutation(
        "Session locks: the row of an alias that had another kind of service is taken",
        _SQL,
        "OR (h.alias = EXCLUDED.alias AND h.backend = EXCLUDED.backend)",
        "OR (h.alias = EXCLUDED.alias)",
        _ALL,
    ),
    Mutation(
        "Session locks: the fence keeps the owner of the first grant",
        _SQL,
        "DO UPDATE SET token = f.token + 1, owner = EXCLUDED.owner",
        "DO UPDATE SET token = f.token + 1",
        _ALL,
    ),
    Mutation(
        "Session locks: a takeover gets the token of the holder before",
        _SQL,
        "DO UPDATE SET token = f.token + 1, owner = EXCLUDED.owner",
        "DO UPDATE SET owner = EXCLUDED.owner",
        (_GRANTS,),
    ),
    Mutation(
        "Session locks: one isn't told that his lock was taken away by force",
        _SQL,
        'SELECT pg_advisory_unlock(%(key)s::bigint), {IS_FORCED.format(owner="%(owner)s")}\n"""',
        'SELECT pg_advisory_unlock(%(key)s::bigint), false\n"""',
        _FORCED,
    ),
    Mutation(
        "Session locks: one whose unfenced lock is listed isn't told that it was taken away",
        _SQL,
        "UNLOCK_LISTED = f\"{UNLOCK}, {IS_FORCED.format(owner='%(owner)s')}\"",
        'UNLOCK_LISTED = f"{UNLOCK}, false"',
        ("tests/test_unfenced.py", *_contract("a_lock_that_is_not_fenced")),
    ),
    Mutation(
        "Session locks: the row goes of whoever came after the dead",
        _SQL,
        "DELETE FROM {HELD} h WHERE h.name = %(name)s AND h.owner = %(owner)s\n    AND NOT EXISTS",
        "DELETE FROM {HELD} h WHERE h.name = %(name)s\n    AND NOT EXISTS",
        _DEAD,
    ),
    Mutation(
        "Session locks: the row of a dead holder stays as long as his session holds another lock",
        _SQL,
        "    JOIN locks k ON k.pid = h.session_pid AND k.key = h.session_key\n    WHERE h.name = %(name)s AND h.owner = %(owner)s),",
        "    JOIN locks k ON k.pid = h.session_pid\n    WHERE h.name = %(name)s AND h.owner = %(owner)s),",
        _DEAD,
    ),
    Mutation(
        "Session locks: the row of a dead holder stays as long as somebody else has the lock",
        _SQL,
        "k.key = h.session_key\n    WHERE h.name = %(name)s AND h.owner = %(owner)s),",
        "k.key = h.session_key\n    WHERE h.name = %(name)s AND h.owner IS NOT NULL),",
        _DEAD,
    ),
    Mutation(
        "Session locks: the session ends of whoever came after the dead",
        _SQL,
        "AND a.backend_start = h.session_started\nWHERE h.name = %(name)s AND h.owner = %(owner)s\n",
        "AND a.backend_start = h.session_started\nWHERE h.name = %(name)s AND h.owner IS NOT NULL\n",
        _DEAD,
    ),
    Mutation(
        "Session locks: the session ends that has its number from a dead holder's",
        _SQL,
        "AND a.backend_start = h.session_started\nWHERE h.name = %(name)s AND h.owner = %(owner)s\n",
        "\nWHERE h.name = %(name)s AND h.owner = %(owner)s\n",
        _DEAD,
    ),
    Mutation(
        "Session locks: the session of a dead holder ends though it has another's lock by now",
        _SQL,
        "JOIN locks k ON k.pid = h.session_pid AND k.key = h.session_key\nJOIN pg_stat_activity a ON a.pid = h.session_pid AND a.backend_start = h.session_started\nWHERE h.name = %(name)s AND h.owner",
        "JOIN pg_stat_activity a ON a.pid = h.session_pid AND a.backend_start = h.session_started\nWHERE h.name = %(name)s AND h.owner",
        _DEAD,
    ),
    Mutation(
        "Session locks: a grant that was waited for passes for one's own though it was overtaken",
        _SQL,
        "FROM s, (SELECT clock_timestamp() AS now) c\nWHERE h.name = %(name)s AND h.owner = %(owner)s RETURNING true",
        "FROM s, (SELECT clock_timestamp() AS now) c\nWHERE h.name = %(name)s RETURNING true",
        _ALL,
    ),
    Mutation(
        "Session locks: a renewal renews the row of whoever came next",
        _SQL,
        "JOIN w ON h.name = w.name AND h.owner = w.owner\n    WHERE w.held",
        "JOIN w ON h.name = w.name\n    WHERE w.held",
        _ALL,
    ),
    Mutation(
        "Session locks: the row of whoever came next is a reason to ask again",
        _SQL,
        "LEFT JOIN {HELD} x ON x.name = w.name AND x.owner = w.owner",
        "LEFT JOIN {HELD} x ON x.name = w.name",
        _ALL,
    ),
    Mutation(
        "Session locks: another session's key is verified as one's own",
        _SQL,
        'VERIFY = f"""\nWITH {LOCKS}\nSELECT EXISTS (SELECT 1 FROM locks k WHERE k.key = %(key)s AND k.pid = pg_backend_pid()),',
        'VERIFY = f"""\nWITH {LOCKS}\nSELECT EXISTS (SELECT 1 FROM locks k WHERE k.key = %(key)s),',
        _ALL,
    ),
    Mutation(
        "Session locks: another owner's row is verified as one's own",
        _SQL,
        "EXISTS (SELECT 1 FROM {HELD} x WHERE x.name = %(name)s AND x.owner = %(owner)s)\nAND NOT",
        "EXISTS (SELECT 1 FROM {HELD} x WHERE x.name = %(name)s)\nAND NOT",
        _ALL,
    ),
    Mutation(
        "Session locks: what was taken away by force is verified",
        _SQL,
        'x.owner = %(owner)s)\nAND NOT {IS_FORCED.format(owner="%(owner)s")}\n',
        "x.owner = %(owner)s)\n",
        _FORCED,
    ),
    Mutation(
        "Session locks: another session's key is verified as an unfenced holder's",
        _SQL,
        'VERIFY_UNFENCED = f"""\nWITH {LOCKS}\nSELECT EXISTS (SELECT 1 FROM locks k WHERE k.key = %(key)s AND k.pid = pg_backend_pid()), true',
        'VERIFY_UNFENCED = f"""\nWITH {LOCKS}\nSELECT EXISTS (SELECT 1 FROM locks k WHERE k.key = %(key)s), true',
        _ALL,
    ),
    Mutation(
        "Session locks: an unfenced lock that was taken away by force is verified",
        _SQL,
        'AND k.pid = pg_backend_pid()),\nNOT {IS_FORCED.format(owner="%(owner)s")}\n',
        "AND k.pid = pg_backend_pid()), true\n",
        ("tests/test_unfenced.py", *_contract("a_lock_that_is_not_fenced")),
    ),
    Mutation(
        "Session locks: the holder is shown by a row that another session left",
        _SQL,
        "LEFT JOIN {HELD} h ON h.name = %(name)s AND h.session_pid = k.pid AND h.session_key = k.key",
        "LEFT JOIN {HELD} h ON h.name = %(name)s",
        _ALL,
    ),
    Mutation(
        "Session locks: holders are shown by rows that other sessions left",
        _SQL,
        "LEFT JOIN {HELD} h ON h.name = w.name AND h.session_pid = k.pid AND h.session_key = k.key",
        "LEFT JOIN {HELD} h ON h.name = w.name",
        _ALL,
    ),
    Mutation(
        "Session locks: a session is ended as hung that hasn't the lock",
        _SQL,
        "    JOIN locks k ON k.pid = h.session_pid AND k.key = h.session_key\n    JOIN pg_stat_activity a ON a.pid = h.session_pid AND a.backend_start = h.session_started\n    WHERE h.name = ANY",
        "    JOIN pg_stat_activity a ON a.pid = h.session_pid AND a.backend_start = h.session_started\n    WHERE h.name = ANY",
        _HUNG,
    ),
    Mutation(
        "Session locks: a row of a former session with this number keeps a hung one alive",
        _SQL,
        "WHERE x.session_pid = h.session_pid AND x.session_started = h.session_started\n",
        "WHERE x.session_pid = h.session_pid\n",
        _HUNG,
    ),
    Mutation(
        "Session locks: a child uses its parent's sessions",
        "backends/postgres_home.py",
        "        _of_parents.append((self._session, self._watched, self._holds, self._wake))\n        self._reset()\n",
        "        _of_parents.append((self._session, self._watched, self._holds, self._wake))\n",
        _DEAD,
    ),
    Mutation(
        "Session locks: a lost lock is unlocked though others have it by now",
        "backends/postgres.py",
        "        with contextlib.suppress(Error):\n            self._release(hold)\n        return Renewal.LOST",
        "        return Renewal.LOST",
        _ALL,
    ),
    Mutation(
        "Session locks: the keeper renews what was taken away, if it is unfenced",
        "backends/postgres.py",
        "if held and not forced and (renewed or not hold.recorded):",
        "if held and (renewed or not hold.recorded):",
        ("tests/test_unfenced.py", *_contract("a_lock_that_is_not_fenced")),
    ),
    Mutation(
        "Session locks: a renewal of what this process lost already asks for whoever has it",
        "backends/postgres.py",
        "held = [lease for lease in leases if self._home.is_held(lease.handle)]",
        "held = list(leases)",
        _ALL,
    ),
    Mutation(
        "Session locks: what this process lost already is verified",
        "backends/postgres.py",
        "        if not self._home.is_held(hold):\n            return False\n        unfenced",
        "        unfenced",
        _ALL,
    ),
    Mutation(
        "Session locks: what one of a process holds is granted to all others of it",
        "backends/postgres_taking.py",
        "return held.grant if held.owner == request.owner.id else None",
        "return held.grant",
        (_GRANTS,),
    ),
    Mutation(
        "Session locks: who is struck gives back what another of his process got",
        "backends/postgres_taking.py",
        "if hold is not None and hold.owner == request.owner.id:",
        "if hold is not None:",
        _ALL,
    ),
)
