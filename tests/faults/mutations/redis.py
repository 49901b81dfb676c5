"""Mutations of the Redis backend: its scripts, and the recording of its grants."""

from __future__ import annotations

from .mutation import REDIS, Mutation

_BACKEND = "tests/test_redis_backend.py"

MUTATIONS = (
    Mutation(
        "A lock is whoever's asks for it: no owner is compared (bare DEL and PEXPIRE)",
        "backends/redis_scripts.py",
        "local mine = held and string.sub(held, 1, #head) == head",
        "local mine = held",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A renewal doesn't compare owner and token",
        "backends/redis_scripts.py",
        "  if string.sub(held, 1, #head) ~= head then return 0 end\n",
        "",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A renewal compares the owner, and not the token",
        "backends/redis_scripts.py",
        "local head = ARGV[1] .. ':' .. ARGV[4] .. ':'\nif held then",
        "local head = ARGV[1] .. ':'\nif held then",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A lease that ran out is renewed though somebody came and went",
        "backends/redis_scripts.py",
        "if ARGV[4] == '0' or drawn > tonumber(ARGV[4]) then return 0 end",
        "if ARGV[4] == '0' then return 0 end",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A renewal of what ran out doesn't take the counter along",
        "backends/redis_scripts.py",
        "redis.call('SET', KEYS[2], ARGV[4] .. ':' .. ARGV[1], 'PX', {_SEQ_TTL})\n",
        "",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A lock never runs out (it is given back in a finally alone)",
        "backends/redis_scripts.py",
        "  redis.call('SET', KEYS[1], ARGV[1] .. ':' .. token .. ':' .. ARGV[3], 'PX', ARGV[2])\n"
        "  return token\n",
        "  redis.call('SET', KEYS[1], ARGV[1] .. ':' .. token .. ':' .. ARGV[3])\n  return token\n",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A request that came twice draws two tokens, of a free lock",
        "backends/redis_scripts.py",
        "token = last == ARGV[1] and drawn or string.format(",
        "token = string.format(",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A request that came twice draws two tokens, of a lock that was waited for",
        "backends/redis_scripts.py",
        "  if last ~= owner then\n",
        "  if owner then\n",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A newcomer passes those who wait",
        "backends/redis_scripts.py",
        "if redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then",
        "if redis.call('EXISTS', KEYS[1]) == 0 then",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A lock is handed to the dead in line",
        "backends/redis_scripts.py",
        "    if alive > now then return owner, alive end",
        "    if alive then return owner, alive end",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A refused one doesn't stand in line",
        "backends/redis_scripts.py",
        "  redis.call('ZADD', KEYS[3], arrival, ARGV[1])\n",
        "",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "Who is handed a lock is told, but doesn't have it yet",
        "backends/redis_scripts.py",
        "  redis.call('SET', KEYS[1], owner .. ':' .. token .. ':', 'PX', {CLAIM * 1000:.0f})\n",
        "",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A repair gives a token to one who was overtaken",
        "backends/redis_scripts.py",
        "if not mine then return nil end\n",
        "",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A repair goes on from Redis's counter, behind the fence as it is",
        "backends/redis_scripts.py",
        "if drawn > tonumber(ARGV[4]) then",
        "if drawn then",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "The counter is forgotten while a client may still record its token",
        "backends/redis_scripts.py",
        "_SEQ_TTL = 14 * 24 * 3600 * 1000",
        "_SEQ_TTL = 1000",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "Who leaves the line as he is handed the lock keeps it",
        "backends/redis_scripts.py",
        "if mine then return take_mine() end\nforget(ARGV[1])",
        "forget(ARGV[1])",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "Who gives back without a token stays in line",
        "backends/redis_scripts.py",
        "if not ARGV[2] then\n  redis.call('ZREM', KEYS[3], ARGV[1])\n",
        "if not ARGV[2] then\n",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A lock handed to one who sleeps elsewhere isn't looked after",
        "backends/redis_store.py",
        "while isinstance(handed, list) and handed and handed[2] >= GATE:",
        "while False:",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "Verifying compares the owner, and not the token",
        "backends/redis_store.py",
        'return held.startswith(f"{lease.owner}:{_token(lease)}:")',
        'return held.startswith(f"{lease.owner}:")',
        (_BACKEND, REDIS),
    ),
    Mutation(
        "An answer that is an error counts as a refusal",
        "backends/redis_store.py",
        "[each if isinstance(each, Exception) else bool(each) for each in answers]",
        "[each == 1 for each in answers]",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "The token is Redis's own: a refused recording counts as a grant",
        "backends/redis.py",
        "            if outcome is _Outcome.RECORDED:\n",
        "            if outcome is not _Outcome.PINNED:\n",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A grant that couldn't be recorded isn't given back",
        "backends/redis.py",
        '            raise self.unavailable("acquiring", exc, request.name) from exc\n'
        "        self._give_back(request)",
        '            raise self.unavailable("acquiring", exc, request.name) from exc',
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A grant that was never recorded, since the fence is pinned, isn't given back",
        "backends/redis.py",
        "            token = newer\n        self._give_back(request)\n        return None",
        "            token = newer\n        return None",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "An old owner who has his key back after a failover isn't told",
        "backends/redis.py",
        "            renewed.update(dict.fromkeys(self._renew_rows(recorded), Renewal.LOST))\n",
        "            self._renew_rows(recorded)\n",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "An old owner's row is put back though a newer grant came",
        "backends/redis.py",
        "        if newest != (lease.token, lease.owner):\n            return False\n",
        "",
        (_BACKEND, REDIS),
    ),
    Mutation(
        "A Redis that doesn't answer refuses",
        "backends/redis.py",
        "        return Renewal.UNKNOWN\n    return Renewal.KEPT if answer",
        "        return Renewal.LOST\n    return Renewal.KEPT if answer",
        (_BACKEND, "tests/test_contract.py::TestOutageOfRedis"),
    ),
    Mutation(
        "The lease counts from when it was granted, not from when it was asked for",
        "backends/redis.py",
        "                return Grant(token, since, handle=request.connection)\n"
        "            if outcome is _Outcome.PINNED",
        "                return Grant(token, clock(), handle=request.connection)\n"
        "            if outcome is _Outcome.PINNED",
        ("tests/test_services.py", _BACKEND, REDIS),
    ),
    Mutation(
        "A forced release doesn't see that he whose key has run out drew above the fence",
        "backends/redis_scripts.py",
        "  if last == ARGV[1] and drawn > tonumber(ARGV[2]) then return 0 end\n",
        "",
        ("tests/test_releasing.py",),
    ),
    Mutation(
        "A cancelled waiter keeps what he is handed",
        "backends/redis.py",
        "            self._give_back(request)\n            return None\n\n    def _leave",
        "            return None\n\n    def _leave",
        (_BACKEND, REDIS),
    ),
)
