"""Mutations of single steps and comparisons in the scripts of Redis, and of what goes with them."""

# ruff: noqa: E501 - quoted code is as long as it is
from __future__ import annotations

from .mutation import Mutation

_SCRIPTS = "backends/redis_scripts.py"
_BACKEND = "tests/test_redis_backend.py"


def _test(name: str) -> str:
    return f"{_BACKEND}::test_{name}"


#: The tests of the line of those who wait.
_LINE = tuple(
    map(
        _test,
        (
            "a_script_run_twice_does_what_it_does_once",
            "a_recheck_run_twice_does_what_it_does_once",
            "a_lock_is_handed_to_the_next_in_line_at_once",
            "eight_are_served_in_the_order_in_which_they_came",
            "a_newcomer_does_not_pass_those_who_wait",
            "who_waits_for_a_dead_holder_is_served_when_his_lease_ends",
            "waiting_ends_in_time_and_leaves_nothing",
            "a_grant_that_comes_as_time_runs_out_is_used",
            "an_eviction_wakes_who_waits",
            "waiters_who_died_in_line_delay_nobody",
            "who_comes_while_the_servers_clock_goes_back_stands_behind",
            "whatever_the_dead_leave_behind_runs_out",
            "a_waiter_who_died_as_he_came_delays_the_next_for_one_claim",
            "a_paused_waiter_who_comes_back_has_his_old_place",
            "a_waiter_whose_message_is_lost_looks_after_a_beat",
            "a_waiter_cancelled_as_he_is_handed_the_lock_hands_it_on",
        ),
    )
)
#: Those of leases that ran out, of a Redis that forgot, and of the registry.
_SOFT = tuple(
    map(
        _test,
        (
            "nobody_releases_or_renews_the_lock_of_another",
            "a_request_that_comes_again_after_its_lock_ran_out_draws_the_same_token",
            "tokens_rise_after_redis_was_emptied",
            "tokens_rise_after_the_counter_was_evicted_from_under_the_holder",
            "an_old_holder_who_has_the_key_back_is_told_that_he_lost_it",
            "one_who_was_overtaken_before_his_grant_was_recorded_gets_none",
            "a_redis_that_goes_on_forgetting_grants_nothing",
            "the_registry_is_cleared_in_one_batch_when_it_is_tidied",
            "a_lock_whose_release_got_no_answer_leaves_no_row",
            "a_lease_that_ran_out_is_renewed_if_nobody_came",
            "a_renewal_after_redis_was_emptied_takes_the_counter_along",
            "a_lease_that_ran_out_is_released_as_it_should_be_if_nobody_came",
            "a_lease_that_ran_out_is_lost_if_somebody_came_and_went",
            "a_lease_that_ran_out_is_lost_if_an_unfenced_holder_came",
            "an_unfenced_lease_that_ran_out_is_lost",
            "a_row_that_is_gone_from_the_registry_is_put_back",
            "leases_are_kept_while_the_database_is_away",
            "one_who_died_in_line_is_evicted_from_it",
            "what_is_taken_away_has_its_counter_lifted",
            "nothing_is_taken_away_from_somebody_else",
            "a_fork_leaves_the_parents_connections_alone",
        ),
    )
)


MUTATIONS = (
    Mutation(
        "Who claims what he was handed leaves the message in his mailbox",
        _SCRIPTS,
        "  redis.call('DEL', KEYS[3] .. ':' .. ARGV[1])\n  forget(ARGV[1])\n",
        "  forget(ARGV[1])\n",
        _LINE,
    ),
    Mutation(
        "Who gets the lock stays in line",
        _SCRIPTS,
        "  forget(ARGV[1])\n  return token\nend",
        "  return token\nend",
        _LINE,
    ),
    Mutation(
        "Who was handed a lock stays in line",
        _SCRIPTS,
        "  forget(owner)\n  redis.call('SET', KEYS[1], owner",
        "  redis.call('SET', KEYS[1], owner",
        _LINE,
    ),
    Mutation(
        "A lock that was waited for never runs out",
        _SCRIPTS,
        "  redis.call('SET', KEYS[1], head .. token .. ':' .. ARGV[3], 'PX', ARGV[2])\n  redis.call('DEL'",
        "  redis.call('SET', KEYS[1], head .. token .. ':' .. ARGV[3])\n  redis.call('DEL'",
        _LINE,
    ),
    Mutation(
        "A lease that ran out and was renewed never runs out again",
        _SCRIPTS,
        "redis.call('SET', KEYS[1], head .. ARGV[3], 'PX', ARGV[2])\nreturn 1",
        "redis.call('SET', KEYS[1], head .. ARGV[3])\nreturn 1",
        _SOFT,
    ),
    Mutation(
        "A lock that was handed to one who died since is his for ever",
        _SCRIPTS,
        "owner .. ':' .. token .. ':', 'PX', {CLAIM * 1000:.0f})",
        "owner .. ':' .. token .. ':')",
        _LINE,
    ),
    Mutation(
        "Who is handed a lock isn't told",
        _SCRIPTS,
        "  redis.call('RPUSH', mailbox, token)\n",
        "",
        _LINE,
    ),
    Mutation(
        "A message that nobody takes stays for ever",
        _SCRIPTS,
        "  redis.call('PEXPIRE', mailbox, {CLAIM * 1000:.0f})\n",
        "",
        _LINE,
    ),
    Mutation(
        "A line that nobody stands in any more stays for ever",
        _SCRIPTS,
        "  redis.call('PEXPIRE', KEYS[3], {_QUEUE_TTL})\n",
        "",
        _LINE,
    ),
    Mutation(
        "Signs of life that nobody gives any more stay for ever",
        _SCRIPTS,
        "  redis.call('PEXPIRE', KEYS[4], {_QUEUE_TTL})\n",
        "",
        _LINE,
    ),
    Mutation(
        "Who waits goes to the end of the line with each sign of life",
        _SCRIPTS,
        "  if place then\n    arrival = place\n  elseif arrival == '0' then",
        "  if place or arrival == '0' then",
        _LINE,
    ),
    Mutation(
        "Who comes while the server's clock goes back passes those who wait",
        _SCRIPTS,
        "math.max(now, (tonumber(last) or 0) + 1)",
        "now",
        _LINE,
    ),
    Mutation(
        "A request that comes twice is refused",
        _SCRIPTS,
        "if mine then return take_mine() end\nlocal arrival",
        "local arrival",
        _LINE,
    ),
    Mutation(
        "A free lock is handed to him who asks for it, and not given",
        _SCRIPTS,
        "if not owner or owner == ARGV[1] then",
        "if not owner then",
        _LINE,
    ),
    Mutation(
        "A release of what ran out says that nobody came, though an unfenced holder did",
        _SCRIPTS,
        "if held or not ARGV[2] or ARGV[2] == '0' then return 0 end",
        "if not ARGV[2] or ARGV[2] == '0' then return 0 end",
        _SOFT,
    ),
    Mutation(
        "An unfenced lock that ran out is said to be released well",
        _SCRIPTS,
        "if held or not ARGV[2] or ARGV[2] == '0' then return 0 end",
        "if held or not ARGV[2] then return 0 end",
        _SOFT,
    ),
    Mutation(
        "A release of what ran out doesn't look whether anybody came",
        _SCRIPTS,
        "return drawn <= tonumber(ARGV[2]) and 1 or 0",
        "return 1",
        _SOFT,
    ),
    Mutation(
        "A release of what ran out says that somebody came, though nobody did",
        _SCRIPTS,
        "return drawn <= tonumber(ARGV[2]) and 1 or 0",
        "return drawn < tonumber(ARGV[2]) and 1 or 0",
        _SOFT,
    ),
    Mutation(
        "A release leaves those who wait to their time-outs",
        _SCRIPTS,
        "  return drawn <= tonumber(ARGV[2]) and 1 or 0\nend\nif redis.call('EXISTS', KEYS[3]) == 1 then",
        "  return drawn <= tonumber(ARGV[2]) and 1 or 0\nend\nif redis.call('EXISTS', KEYS[3]) == 2 then",
        _LINE,
    ),
    Mutation(
        "A forced release leaves those who wait to their time-outs",
        _SCRIPTS,
        "', 'PX', {_SEQ_TTL})\n  end\nend\nif redis.call('EXISTS', KEYS[3]) == 1 then",
        "', 'PX', {_SEQ_TTL})\n  end\nend\nif redis.call('EXISTS', KEYS[3]) == 2 then",
        (_test("what_is_taken_away_is_handed_to_the_first_in_line_at_once"),),
    ),
    Mutation(
        "A forced release lowers a counter that is higher already",
        _SCRIPTS,
        "  if drawn < tonumber(ARGV[2]) then\n",
        "  if drawn then\n",
        ("tests/test_releasing.py", *_SOFT),
    ),
    Mutation(
        "A recheck takes the lock from one who has claimed it",
        _SCRIPTS,
        "if redis.call('GET', KEYS[1]) ~= ARGV[1] .. ':' .. ARGV[2] .. ':'\n    or redis.call",
        "if redis.call",
        _LINE,
    ),
    Mutation(
        "A recheck takes the lock from one who has taken his message, and not claimed it yet",
        _SCRIPTS,
        "\n    or redis.call('EXISTS', KEYS[3] .. ':' .. ARGV[1]) == 0 then",
        " then",
        _LINE,
    ),
    Mutation(
        "Who leaves without the lock stays in line",
        _SCRIPTS,
        "forget(ARGV[1])\nredis.call('DEL', KEYS[3] .. ':' .. ARGV[1])\nreturn nil",
        "redis.call('DEL', KEYS[3] .. ':' .. ARGV[1])\nreturn nil",
        _LINE,
    ),
    Mutation(
        "A repair leaves the counter behind the fence",
        _SCRIPTS,
        "else\n  redis.call('SET', KEYS[2], token .. ':' .. ARGV[1], 'PX', {_SEQ_TTL})\nend",
        "end",
        _SOFT,
    ),
    Mutation(
        "A repaired grant can't be renewed: its key has the former token",
        _SCRIPTS,
        "redis.call('SET', KEYS[1], head .. token .. ':' .. ARGV[3], 'PX', ARGV[2])\nreturn token\n",
        "return token\n",
        _SOFT,
    ),
    Mutation(
        "An unfenced lock that ran out is renewed, though somebody may have come and gone",
        _SCRIPTS,
        "if ARGV[4] == '0' or drawn > tonumber(ARGV[4]) then return 0 end",
        "if drawn > tonumber(ARGV[4]) then return 0 end",
        _SOFT,
    ),
    Mutation(
        "An unfenced lock that ran out is verified",
        "backends/redis_store.py",
        'return lease.fenced and int(drawn.partition(":")[0] or 0) <= lease.token',
        'return not lease.fenced or int(drawn.partition(":")[0] or 0) <= lease.token',
        _SOFT,
    ),
    Mutation(
        "A lease that ran out is verified though somebody came and went",
        "backends/redis_store.py",
        'return lease.fenced and int(drawn.partition(":")[0] or 0) <= lease.token',
        "return lease.fenced",
        _SOFT,
    ),
    Mutation(
        "An overtaken one who can't be repaired is granted what he was refused",
        "backends/redis_recording.py",
        "            if newer is None:\n                return None\n",
        "            if newer is None:\n                return Grant(token, since, handle=request.connection)\n",
        _SOFT,
    ),
    Mutation(
        "An old owner who has his key back after a failover keeps it",
        "backends/redis.py",
        "            with contextlib.suppress(*RedisError):\n                self._store.release(lease)\n        return overtaken",
        "            pass\n        return overtaken",
        _SOFT,
    ),
    Mutation(
        "The row of a released lock is never cleared",
        "backends/redis.py",
        "            if lease.fenced:\n                self._clear_row(lease)\n",
        "            if lease is None:\n                self._clear_row(lease)\n",
        _SOFT,
    ),
    Mutation(
        "The row is cleared of one from whom nothing was taken",
        "backends/redis.py",
        "        if had and token is not None:\n",
        "        if token is not None:\n",
        ("tests/test_releasing.py", *_SOFT),
    ),
)
