"""
The Lua scripts of the Redis backend, and the keys that they work on.

The truth is the lock key. A message in a mailbox is a hint, never a grant: whatever wakes a waiter,
it runs ACQUIRE, and only the answer of that script counts. The counter is soft state: the fence
rejects a token that isn't higher than all before. Every script may run twice, since redis-py
repeats requests.
"""

from __future__ import annotations

from hashlib import blake2b, sha1
from typing import NamedTuple

#: Seconds of the longest blocking pop. A waiter runs ACQUIRE after each, which is its heartbeat.
BEAT = 2.0
#: Seconds that a heartbeat counts, and that a waiter has to claim a lock that was handed to it.
#: ALIVE > BEAT: a live waiter must not be passed over. CLAIM >= ALIVE: one claim that expires
#: outlives the heartbeats of all waiters that died together.
ALIVE = 3.0
CLAIM = 3.0
#: Milliseconds after its last heartbeat until a live waiter is certainly in its blocking pop.
GATE = 50

# Longer than any client keeps a token that it hasn't recorded yet.
_COUNTER_TTL = 14 * 24 * 3600 * 1000
_QUEUE_TTL = 60_000


class Keys(NamedTuple):
    """
    The keys of one lock. They share a hash tag, and so one slot of a Cluster.

    A script is given all three: while a slot moves, Redis runs it where all of its keys are.
    """

    #: "owner:token:identity", with the ttl of the lease. The token is 0 if it isn't fenced; the
    #: identity is empty from a hand-over until the new owner claims the lock.
    lock: str
    #: "last token:owner that drew it". A repeated request gets the same token. The owner is empty
    #: after a release and a suggestion: then no expired lease is renewed.
    counter: str
    #: Sorted set of waiting owners by arrival, in microseconds of the server's clock. The scripts
    #: append ":" for that by the end of their last heartbeat, and ":owner" for an owner's mailbox:
    #: the list that wakes it.
    queue: str

    @classmethod
    def of(cls, prefix: str, name: str) -> Keys:
        whole = f"{prefix or 'fencedlock'}:{name}"
        tag = f"{{{whole}}}"
        if "}" in whole:
            # A tag ends at its first closing brace, and an empty tag doesn't count.
            tag = f"{{{blake2b(whole.encode(), digest_size=16).hexdigest()}}}:{whole}"
        return cls(f"{tag}:lock", f"{tag}:seq", f"{tag}:queue")


class Script:
    """One script: sent by its hash, and as a whole to a server that doesn't have it."""

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        # The hash that EVALSHA takes.
        self.sha = sha1(self.text.encode()).hexdigest()


_HELD = """
local head = ARGV[1] .. ':'
local held = redis.call('GET', KEYS[1])
local mine = held and string.sub(held, 1, #head) == head
"""

# Numbers are formatted: Lua writes 1.79e15 as "1.79e+15".
_DRAW = f"""
local function draw(owner)
  local drawn, last = string.match(redis.call('GET', KEYS[2]) or '', '^(%d+):(.*)$')
  if last ~= owner then
    drawn = string.format('%.0f', (tonumber(drawn) or 0) + 1)
  end
  redis.call('SET', KEYS[2], drawn .. ':' .. owner, 'PX', {_COUNTER_TTL})
  return drawn
end
"""

_QUEUE = f"""
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local heartbeats = KEYS[3] .. ':'

local function leave_queue(owner)
  redis.call('ZREM', KEYS[3], owner)
  redis.call('ZREM', heartbeats, owner)
end

local function first_alive()
  while true do
    local owner = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
    if not owner then return nil end
    local alive = tonumber(redis.call('ZSCORE', heartbeats, owner) or 0)
    if alive > now then return owner, alive end
    leave_queue(owner)
  end
end

local function hand_to(owner, alive)
  local token = draw(owner)
  local mailbox = KEYS[3] .. ':' .. owner
  leave_queue(owner)
  redis.call('SET', KEYS[1], owner .. ':' .. token .. ':', 'PX', {CLAIM * 1000:.0f})
  redis.call('RPUSH', mailbox, token)
  redis.call('PEXPIRE', mailbox, {CLAIM * 1000:.0f})
  return {{owner, token, math.floor((now + {ALIVE * 1_000_000:.0f} - alive) / 1000)}}
end
"""

# KEYS     as in Keys
# ARGV     owner, ttl in ms, identity, 1 if fenced; to queue if refused: 0, or the arrival that was
#          returned before. Without it the owner leaves the queue.
# Returns  the token, 0 if unfenced; or {ms until the lock expires, arrival, handed, lock key}:
#          handed is {} or {owner, token, ms since its last heartbeat} of a waiter it was handed to
# An uncontended lock runs the first part alone. An unfenced grant raises an existing counter too:
# it shows an expired fenced lease that another owner came. A newcomer doesn't get a free lock
# before the queue, but hands it to the first waiter.
ACQUIRE = Script(f"""
{_DRAW}
local fenced = ARGV[4] == '1'
local function grant(token)
  if not token and (fenced or redis.call('EXISTS', KEYS[2]) == 1) then token = draw(ARGV[1]) end
  if not fenced then token = '0' end
  redis.call('SET', KEYS[1], ARGV[1] .. ':' .. token .. ':' .. ARGV[3], 'PX', ARGV[2])
  return token
end
if redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then return grant() end
{_HELD}
{_QUEUE}
local mailbox = KEYS[3] .. ':' .. ARGV[1]
local arrival = ARGV[5]
if arrival and not mine then
  local place = redis.call('ZSCORE', KEYS[3], ARGV[1])
  if place then
    arrival = place
  elseif arrival == '0' then
    local last = redis.call('ZREVRANGE', KEYS[3], 0, 0, 'WITHSCORES')[2]
    arrival = string.format('%.0f', math.max(now, (tonumber(last) or 0) + 1))
  end
  redis.call('ZADD', KEYS[3], arrival, ARGV[1])
  redis.call('ZADD', heartbeats, string.format('%.0f', now + {ALIVE * 1_000_000:.0f}), ARGV[1])
  redis.call('PEXPIRE', KEYS[3], {_QUEUE_TTL})
  redis.call('PEXPIRE', heartbeats, {_QUEUE_TTL})
end
local handed = {{}}
if not held then
  local owner, alive = first_alive()
  if owner and owner ~= ARGV[1] then handed = hand_to(owner, alive) else mine = true end
end
if mine or not arrival then
  leave_queue(ARGV[1])
  -- Otherwise RECHECK reads a message as proof that the owner still sleeps.
  redis.call('DEL', mailbox)
end
if mine then return grant(held and string.match(held, ':(%d+):')) end
return {{redis.call('PTTL', KEYS[1]), arrival or '', handed, redis.call('GET', KEYS[1])}}
""")

# KEYS     as in Keys
# ARGV     owner; only if fenced: the counter if no other owner came since, "" if unknown
# Returns  1 if the owner had the lock or a place in the queue, else 0; or handed, as in ACQUIRE
# An expired lease is the owner's if no other came since, as in RENEW. The owner leaves the counter:
# a renewal that arrives late must not bring the lock back.
RELEASE = Script(f"""
{_HELD}
local had = 1
if not mine then
  had = redis.call('ZREM', KEYS[3], ARGV[1])
  redis.call('ZREM', KEYS[3] .. ':', ARGV[1])
  redis.call('DEL', KEYS[3] .. ':' .. ARGV[1])
  if held then return had end
end
if ARGV[2] then
  local counter = redis.call('GET', KEYS[2])
  local drawn, last = string.match(counter or ARGV[2], '^(%d+):(.*)$')
  if last == ARGV[1] and (not counter or ARGV[2] == '' or ARGV[2] == counter) then had = 1 end
  if (last or ARGV[1]) == ARGV[1] then
    redis.call('SET', KEYS[2], (drawn or '0') .. ':', 'PX', {_COUNTER_TTL})
  end
end
if not mine then return had end
if redis.call('EXISTS', KEYS[3]) == 1 then
  {_DRAW}
  {_QUEUE}
  local owner, alive = first_alive()
  if owner then return hand_to(owner, alive) end
end
redis.call('DEL', KEYS[1], KEYS[3] .. ':' .. ARGV[1])
return 1
""")

# Redis serves a client that is blocked on a mailbox before it runs any other command. If the
# message is still there, the waiter wasn't blocked. The message stays: it must wake a live waiter
# that was between two commands.
# KEYS     as in Keys
# ARGV     owner and token, as handed
# Returns  {} if the waiter has the lock or no other waits, else handed, as in ACQUIRE
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

# KEYS     lock and counter of each lease
# ARGV     value of the lock key and ttl in ms of each lease
# Returns  of each lease 1 if it was renewed, else 0
# A fenced lease that expired is renewed if no other owner came since. pcall: a key of another type,
# which other software has set, is an error of its own lease alone.
RENEW = Script(f"""
local answers = {{}}
for last = 2, #KEYS, 2 do
  local lock, counter, value, ttl = KEYS[last - 1], KEYS[last], ARGV[last - 1], ARGV[last]
  local held = redis.pcall('GET', lock)
  local renewed = 0
  if held == value then
    renewed = redis.call('PEXPIRE', lock, ttl)
  elseif not held then
    local owner, token = string.match(value, '^([^:]*):(%d+):')
    local mine = token .. ':' .. owner
    if token ~= '0' and (redis.pcall('GET', counter) or mine) == mine then
      redis.call('SET', counter, mine, 'PX', {_COUNTER_TTL})
      redis.call('SET', lock, value, 'PX', ttl)
      renewed = 1
    end
  end
  answers[last / 2] = renewed
end
return answers
""")

# KEYS     lock and queue of each lock
# Returns  of each lock {value of the lock key, ms until it expires, number of waiters}
LOOK = Script("""
local found = {}
for last = 2, #KEYS, 2 do
  local lock = KEYS[last - 1]
  found[last / 2] = {
    redis.call('GET', lock), redis.call('PTTL', lock), redis.call('ZCARD', KEYS[last])
  }
end
return found
""")

# KEYS     counter
# ARGV     a token that the next one must exceed
SUGGEST = Script(f"""
local drawn = tonumber(string.match(redis.call('GET', KEYS[1]) or '', '^%d+')) or 0
if drawn < tonumber(ARGV[1]) then
  redis.call('SET', KEYS[1], ARGV[1] .. ':', 'PX', {_COUNTER_TTL})
end
""")

# KEYS     the mailbox of a waiter whose wait was cancelled
WAKE = Script(f"""
redis.call('RPUSH', KEYS[1], '')
redis.call('PEXPIRE', KEYS[1], {CLAIM * 1000:.0f})
""")
