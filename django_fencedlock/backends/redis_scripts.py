"""
The Lua scripts of the Redis backend.

Each but EXTEND works on the keys of one lock, which share a hash tag and so a slot of a cluster:

    KEYS[1]  lock    "owner:token:words", with the lease's ttl; the words tell the owner's process,
                     and people who he is
    KEYS[2]  seq     "last token:owner who drew it": a repeated request gets the same number
    KEYS[3]  queue   sorted set of waiting owners by arrival, in microseconds of the server's clock
    KEYS[4]  alive   sorted set of waiting owners by when their last sign of life wears out

and on mailboxes, lists named after the queue and their owner. A message in a mailbox is a hint and
never a grant: the one who waits claims the lock by the acquire script, whatever woke him. The lock
is his by then, for as long as a claim may take. `ARGV[1]` is always the caller's owner.

The counter is soft state: the database refuses a token that isn't newer than all before.
Every script may be run twice: redis-py repeats requests by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha1
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from .redis_lines import ask_many, drop_former_primary, unwrapped

#: Seconds of the longest blocking pop; each ends in a sign of life.
BEAT = 2.0
#: Seconds that a sign of life is worth, and that a waiter has to claim what was handed to him.
#: ALIVE > BEAT, for a living waiter must not be passed over; CLAIM >= ALIVE, so that one claim
#: that lapses outlives the signs of life of all who died together.
ALIVE = 3.0
CLAIM = 3.0
#: Milliseconds since the last sign of life from which on a waiter has to be in his blocking pop.
GATE = 50

# The counter outlasts every client that may still have a token of it to record.
_SEQ_TTL = 14 * 24 * 3600 * 1000
# Long after the last waiter gave his last sign of life.
_QUEUE_TTL = 60_000

_DRAW = f"""
local function draw(owner)
  local drawn, last = string.match(redis.call('GET', KEYS[2]) or '', '^(%d+):(.*)$')
  if last ~= owner then
    drawn = string.format('%.0f', (tonumber(drawn) or 0) + 1)
  end
  redis.call('SET', KEYS[2], drawn .. ':' .. owner, 'PX', {_SEQ_TTL})
  return drawn
end
"""

# Numbers go out through format: Lua writes 1.79e15 as "1.79e+15".
_QUEUE = f"""
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local function forget(owner)
  redis.call('ZREM', KEYS[3], owner)
  redis.call('ZREM', KEYS[4], owner)
end

local function first_alive()
  while true do
    local owner = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
    if not owner then return nil end
    local alive = tonumber(redis.call('ZSCORE', KEYS[4], owner) or 0)
    if alive > now then return owner, alive end
    forget(owner)
  end
end

local function hand_to(owner, alive)
  local token = draw(owner)
  local mailbox = KEYS[3] .. ':' .. owner
  forget(owner)
  redis.call('SET', KEYS[1], owner .. ':' .. token .. ':', 'PX', {CLAIM * 1000:.0f})
  redis.call('RPUSH', mailbox, token)
  redis.call('PEXPIRE', mailbox, {CLAIM * 1000:.0f})
  return {{owner, token, math.floor((now + {ALIVE * 1_000_000:.0f} - alive) / 1000)}}
end
"""

_MINE = """
local head = ARGV[1] .. ':'
local held = redis.call('GET', KEYS[1])
local mine = held and string.sub(held, 1, #head) == head
"""

# The mailbox goes in the same script: a recheck would take a message in it for proof that the
# waiter sleeps, and the lock from him who holds it.
_TAKE = """
local function take(token)
  redis.call('SET', KEYS[1], head .. token .. ':' .. ARGV[3], 'PX', ARGV[2])
  redis.call('DEL', KEYS[3] .. ':' .. ARGV[1])
  forget(ARGV[1])
  return token
end

local function take_mine()
  return take(ARGV[4] == '1' and string.match(held, ':(%d+):') or '0')
end
"""


class Script:
    """One script: sent by its hash, and whole to a server that doesn't know it."""

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        # What EVALSHA names a script by.
        self.sha = sha1(self.text.encode()).hexdigest()

    def run(self, asked: Any, keys: Sequence[str], *args: object) -> Any:
        """Run it on one lock. Who is asked is a client, or `Lines`."""
        try:
            try:
                return asked.execute_command("EVALSHA", self.sha, len(keys), *keys, *args)
            except NoScriptError:
                return asked.execute_command("EVAL", self.text, len(keys), *keys, *args)
        except ResponseError as exc:
            found = _read_only(asked, exc)
            if found is exc:
                raise
            raise found from exc

    def run_many(
        self,
        asked: Any,
        calls: Sequence[tuple[Sequence[str], Sequence[object]]],
    ) -> list[Any]:
        """Run it on many locks in one batch; an answer may be an exception."""
        given = [(len(keys), *keys, *args) for keys, args in calls]
        answers = ask_many(asked, [("EVALSHA", self.sha, *each) for each in given])
        unknown = [place for place, each in enumerate(answers) if isinstance(each, NoScriptError)]
        if unknown:
            again = ask_many(asked, [("EVAL", self.text, *given[place]) for place in unknown])
            for place, answer in zip(unknown, again, strict=True):
                answers[place] = answer
        return [_read_only(asked, each) for each in answers]


def _read_only(asked: Any, answer: Any) -> Any:
    """Return the ReadOnlyError that an answer wraps, else the answer."""
    found = unwrapped(answer)
    if found is not answer:
        drop_former_primary(asked)
    return found


# ARGV     owner, ttl in ms, words, 1 if fenced; to wait as well: arrival, as told before, or 0
# returns  the token, 0 if unfenced; or if refused {ms until the lock's end, arrival, handed, held},
#          where handed is {} or {owner, token, ms since his last sign of life} of whom it was
#          handed to, and held is what the lock said before
# An unfenced grant raises the counter too, if there is one: by the counter, RENEW, RELEASE and the
# verification of an expired fenced lease see that another owner came since.
# The first part is all there is to an uncontended lock; it comes before any function is made. A
# newcomer doesn't take a free lock from those in the queue, but hands it to the first of them.
ACQUIRE = Script(f"""
if redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then
  local token = '0'
  local drawn, last = string.match(redis.call('GET', KEYS[2]) or '', '^(%d+):(.*)$')
  if drawn or ARGV[4] == '1' then
    token = last == ARGV[1] and drawn or string.format('%.0f', (tonumber(drawn) or 0) + 1)
    redis.call('SET', KEYS[2], token .. ':' .. ARGV[1], 'PX', {_SEQ_TTL})
  end
  if ARGV[4] ~= '1' then token = '0' end
  redis.call('SET', KEYS[1], ARGV[1] .. ':' .. token .. ':' .. ARGV[3], 'PX', ARGV[2])
  return token
end
{_MINE}
{_DRAW}
{_QUEUE}
{_TAKE}
if mine then return take_mine() end
local arrival = ARGV[5]
if arrival then
  local place = redis.call('ZSCORE', KEYS[3], ARGV[1])
  if place then
    arrival = place
  elseif arrival == '0' then
    local last = redis.call('ZREVRANGE', KEYS[3], 0, 0, 'WITHSCORES')[2]
    arrival = string.format('%.0f', math.max(now, (tonumber(last) or 0) + 1))
  end
  local alive = string.format('%.0f', now + {ALIVE * 1_000_000:.0f})
  redis.call('ZADD', KEYS[3], arrival, ARGV[1])
  redis.call('ZADD', KEYS[4], alive, ARGV[1])
  redis.call('PEXPIRE', KEYS[3], {_QUEUE_TTL})
  redis.call('PEXPIRE', KEYS[4], {_QUEUE_TTL})
end
local handed = {{}}
if not held then
  local owner, alive = first_alive()
  if not owner or owner == ARGV[1] then
    local token = '0'
    if ARGV[4] == '1' or redis.call('EXISTS', KEYS[2]) == 1 then token = draw(ARGV[1]) end
    return take(ARGV[4] == '1' and token or '0')
  end
  handed = hand_to(owner, alive)
end
return {{redis.call('PTTL', KEYS[1]), arrival or '0', handed, held or ''}}
""")

# A lease that ran out was the owner's to the end if nobody came since, as for RENEW.
# ARGV     owner; token (0 if unfenced), or none to leave the queue as well
# returns  0 if the lock isn't the owner's, 1 if it was, or handed, as in acquire
RELEASE = Script(f"""
{_MINE}
if not ARGV[2] then
  redis.call('ZREM', KEYS[3], ARGV[1])
  redis.call('ZREM', KEYS[4], ARGV[1])
  redis.call('DEL', KEYS[3] .. ':' .. ARGV[1])
end
if not mine then
  if held or not ARGV[2] or ARGV[2] == '0' then return 0 end
  local drawn = tonumber(string.match(redis.call('GET', KEYS[2]) or '', '^%d+')) or 0
  return drawn <= tonumber(ARGV[2]) and 1 or 0
end
if redis.call('EXISTS', KEYS[3]) == 1 then
  {_DRAW}
  {_QUEUE}
  local owner, alive = first_alive()
  if owner then return hand_to(owner, alive) end
end
redis.call('DEL', KEYS[1])
return 1
""")

# The counter goes above the holder's token, or he would renew what seems to have run out.
# ARGV     owner, token of the lifted fence (0 if unfenced)
# returns  0 if somebody else has the lock, or he a token above the fence, which he may renew though
#          the key has run out; else 1, or handed, as in acquire
TAKE_AWAY = Script(f"""
{_MINE}
if held and not mine then return 0 end
if ARGV[2] ~= '0' then
  if mine and tonumber(string.match(held, ':(%d+):')) > tonumber(ARGV[2]) then return 0 end
  local number, last = string.match(redis.call('GET', KEYS[2]) or '', '^(%d+):(.*)$')
  local drawn = tonumber(number) or 0
  if last == ARGV[1] and drawn > tonumber(ARGV[2]) then return 0 end
  if drawn < tonumber(ARGV[2]) then
    redis.call('SET', KEYS[2], ARGV[2] .. ':', 'PX', {_SEQ_TTL})
  end
end
if redis.call('EXISTS', KEYS[3]) == 1 then
  {_DRAW}
  {_QUEUE}
  local owner, alive = first_alive()
  if owner then return hand_to(owner, alive) end
end
redis.call('DEL', KEYS[1])
return 1
""")

# The owner is whom the lock was handed to. Redis serves those who are blocked on a mailbox when the
# command ends that filled it, before anybody's next: if the message is still there, he wasn't.
# The message stays: a living waiter who was between two commands has to be woken by it.
# ARGV     owner, token
# returns  {} if he has it, or nobody else is there; else handed, as in acquire
RECHECK = Script(f"""
if redis.call('GET', KEYS[1]) ~= ARGV[1] .. ':' .. ARGV[2] .. ':'
    or redis.call('EXISTS', KEYS[3] .. ':' .. ARGV[1]) == 0 then
  return {{}}
end
{_DRAW}
{_QUEUE}
local owner, alive = first_alive()
return owner and hand_to(owner, alive) or {{}}
""")

# For him whose time is up. He may have been handed the lock a moment before.
# ARGV     owner, ttl in ms, words, 1 if fenced
# returns  the token if the lock is his, else nil
LEAVE = Script(f"""
{_MINE}
local function forget(owner)
  redis.call('ZREM', KEYS[3], owner)
  redis.call('ZREM', KEYS[4], owner)
end
{_TAKE}
if mine then return take_mine() end
forget(ARGV[1])
redis.call('DEL', KEYS[3] .. ':' .. ARGV[1])
return nil
""")

# After Redis forgot its counter: the database knew a token as new as the one that was drawn.
# ARGV     owner, ttl in ms, words, newest recorded token, that plus one (Lua's numbers are floats)
# returns  a token newer than the recorded one, or nil if the lock isn't the owner's any more
REPAIR = Script(f"""
{_MINE}
if not mine then return nil end
local drawn = tonumber(string.match(redis.call('GET', KEYS[2]) or '', '^%d+')) or 0
local token = ARGV[5]
if drawn > tonumber(ARGV[4]) then
  {_DRAW}
  token = draw(ARGV[1])
else
  redis.call('SET', KEYS[2], token .. ':' .. ARGV[1], 'PX', {_SEQ_TTL})
end
redis.call('SET', KEYS[1], head .. token .. ':' .. ARGV[3], 'PX', ARGV[2])
return token
""")

# Of many locks, KEYS their lock keys: no cluster has those in one slot.
# ARGV     of each, "owner:token:" and ttl in ms
# returns  of each, 1 if it is the owner's and was renewed, or 0: RENEW tells more
EXTEND = Script("""
local answers = {}
for place, key in ipairs(KEYS) do
  local head = ARGV[2 * place - 1]
  local held = redis.call('GET', key)
  answers[place] = '0'
  if held and string.sub(held, 1, #head) == head then
    answers[place] = redis.call('PEXPIRE', key, ARGV[2 * place])
  end
end
return table.concat(answers)
""")

# A lease that ran out is renewed if nobody came since: the counter tells, if it was fenced.
# ARGV     owner, ttl in ms, words, token (0 if unfenced)
# returns  1 if it was renewed, else 0
RENEW = Script(f"""
local held = redis.call('GET', KEYS[1])
local head = ARGV[1] .. ':' .. ARGV[4] .. ':'
if held then
  if string.sub(held, 1, #head) ~= head then return 0 end
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
local drawn = tonumber(string.match(redis.call('GET', KEYS[2]) or '', '^%d+')) or 0
if ARGV[4] == '0' or drawn > tonumber(ARGV[4]) then return 0 end
redis.call('SET', KEYS[2], ARGV[4] .. ':' .. ARGV[1], 'PX', {_SEQ_TTL})
redis.call('SET', KEYS[1], head .. ARGV[3], 'PX', ARGV[2])
return 1
""")
