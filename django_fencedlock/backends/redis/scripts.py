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

from ...core.names import read_permit
from ..interface import SHARED

#: Seconds of the longest blocking pop. A waiter runs ACQUIRE after each, which is its heartbeat.
BEAT = 2.0
#: Seconds that a heartbeat counts, and that a waiter has to claim a lock that was handed to it.
#: ALIVE > BEAT: a live waiter must not be passed over. CLAIM >= ALIVE: one claim that expires
#: outlives the heartbeats of all waiters that died together.
ALIVE = 3.0
CLAIM = 3.0
#: Milliseconds after its last heartbeat until a live waiter is certainly in its blocking pop.
GATE = 50

#: Seconds after a lock expires until others look than the first waiter. One that wakes up with them
#: would be taken for dead by RECHECK. An idle server ends a blocking pop up to 0.1 s late.
LATER = 0.15

# Longer than any client keeps a token that it hasn't recorded yet.
_COUNTER_TTL = 14 * 24 * 3600 * 1000
_QUEUE_TTL = 60_000


class Keys(NamedTuple):
    """
    The keys of one lock. They share a hash tag, and so one slot of a Cluster.

    A script is given all three: while a slot moves, Redis runs it where all of its keys are. The
    permits of one name share the tag and the queue. It isn't the queue of the lock without a limit.
    """

    #: "owner:token:identity", with the ttl of the lease. The token is 0 if it isn't fenced; the
    #: identity is empty from a hand-over until the new owner claims the lock. Of a shared lock it
    #: is a sorted set: "owner:shared:identity" of each reader by the end of its lease, in
    #: milliseconds of the server's clock. The key lives as long as the last of them. The key of a
    #: permit ends in its number, that of another lock doesn't end in a digit.
    lock: str
    #: Sorted set of waiting owners by arrival, in microseconds of the server's clock. The scripts
    #: append ":" for that by the end of their last heartbeat, ":owner" for an owner's mailbox: the
    #: list that wakes it, and ":owner:" for what it waits for: permits as ",1,2,3,", or what a
    #: reader has in the lock key.
    queue: str
    #: "last token:owner that drew it". A repeated request gets the same token. The owner is empty
    #: after a release and a suggestion: then no expired lease is renewed. That of readers is
    #: "shared": the first one after a writer raises the counter.
    counter: str

    @classmethod
    def of(cls, prefix: str, name: str) -> Keys:
        base, number = read_permit(name) or (name, 0)
        whole = f"{prefix or 'fencedlock'}:{base}"
        tag = f"{{{whole}}}"
        if "}" in whole:
            # A tag ends at its first closing brace, and an empty tag doesn't count.
            tag = f"{{{blake2b(whole.encode(), digest_size=16).hexdigest()}}}:{whole}"
        if number:
            return cls(f"{tag}:permit:{number}", f"{tag}:permits", f"{tag}:seq:{number}")
        return cls(f"{tag}:lock", f"{tag}:queue", f"{tag}:seq")


class Script:
    """One script: sent by its hash, and as a whole to a server that doesn't have it."""

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        # The hash that EVALSHA takes.
        self.sha = sha1(self.text.encode()).hexdigest()


# The parts of the scripts work on the lock whose keys are in the variables lock, queue and counter.
# Numbers are formatted: Lua writes 1.79e15 as "1.79e+15".
DRAW = f"""
local function draw(owner)
  local drawn, last = string.match(redis.call('GET', counter) or '', '^(%d+):(.*)$')
  if last ~= owner then
    drawn = string.format('%.0f', (tonumber(drawn) or 0) + 1)
  end
  redis.call('SET', counter, drawn .. ':' .. owner, 'PX', {_COUNTER_TTL})
  return drawn
end
"""

# An unfenced grant raises an existing counter too: it shows an expired fenced lease that another
# owner came.
_GRANT = f"""
{DRAW}
local function grant(token)
  if not token and (fenced == '1' or redis.call('EXISTS', counter) == 1) then
    token = draw(owner)
  end
  if fenced ~= '1' then token = '0' end
  redis.call('SET', lock, owner .. ':' .. token .. ':' .. identity, 'PX', ttl)
  return token
end
"""

# first_alive() passes over those that don't wait for this permit. They keep their places. Its third
# value is what a reader has in the lock key, nil of others. hand_to() lets all readers in that come
# before the next writer, and returns what RELEASE does.
QUEUE = f"""
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function leave_queue(owner)
  redis.call('ZREM', queue, owner)
  redis.call('ZREM', queue .. ':', owner)
end

local function first_alive()
  local permit, place = string.match(lock, '%d+$'), 0
  while true do
    local owner = redis.call('ZRANGE', queue, place, place)[1]
    if not owner then return nil end
    local alive = tonumber(redis.call('ZSCORE', queue .. ':', owner) or 0)
    local wanted = redis.call('GET', queue .. ':' .. owner .. ':') or ''
    if alive <= now then
      leave_queue(owner)
    elseif permit and not string.find(wanted, ',' .. permit .. ',', 1, true) then
      place = place + 1
    else
      return owner, alive, not permit and wanted ~= '' and wanted
    end
  end
end

-- Of a shared lock: whether a reader has it.
local function any_reader()
  redis.call('ZREMRANGEBYSCORE', lock, '-inf', string.format('%.0f', now / 1000))
  local ends = redis.call('ZREVRANGE', lock, 0, 0, 'WITHSCORES')[2]
  return ends and redis.call('PEXPIREAT', lock, ends) == 1
end

local function let_in(reader, ms)
  if type(redis.pcall('GET', lock)) == 'string' then redis.call('DEL', lock) end
  redis.call('ZADD', lock, string.format('%.0f', now / 1000 + ms), reader)
  any_reader()
end

local function wake(owner)
  local mailbox = queue .. ':' .. owner
  leave_queue(owner)
  redis.call('RPUSH', mailbox, '')
  redis.call('PEXPIRE', mailbox, {CLAIM * 1000:.0f})
end

local function hand_to(owner, alive, reader)
  local token = draw(reader and '{SHARED}' or owner)
  if reader then
    while reader do
      let_in(reader, {CLAIM * 1000:.0f})
      wake(owner)
      owner, alive, reader = first_alive()
    end
    return {{}}
  end
  wake(owner)
  redis.call('SET', lock, owner .. ':' .. token .. ':', 'PX', {CLAIM * 1000:.0f})
  return {{owner, token, math.floor((now + {ALIVE * 1_000_000:.0f} - alive) / 1000)}}
end
"""

# Of the script's own owner. `wanted` is what it waits for, as in Keys.
ENQUEUE = f"""
local function enqueue(wanted)
  local place = redis.call('ZSCORE', queue, owner)
  if place then
    arrival = place
  elseif arrival == '0' then
    local last = redis.call('ZREVRANGE', queue, 0, 0, 'WITHSCORES')[2]
    arrival = string.format('%.0f', math.max(now, (tonumber(last) or 0) + 1))
  end
  redis.call('ZADD', queue, arrival, owner)
  redis.call('ZADD', queue .. ':', string.format('%.0f', now + {ALIVE * 1_000_000:.0f}), owner)
  redis.call('PEXPIRE', queue, {_QUEUE_TTL})
  redis.call('PEXPIRE', queue .. ':', {_QUEUE_TTL})
  if wanted then redis.call('SET', queue .. ':' .. owner .. ':', wanted, 'PX', {_QUEUE_TTL}) end
end
"""

# Who holds the lock: the value of its key, or the reader whose lease ends first.
SHOW = """
local function show()
  local held = redis.pcall('GET', lock)
  if type(held) ~= 'table' then return held end
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  return redis.call('ZRANGEBYSCORE', lock, now, '+inf', 'LIMIT', 0, 1)[1] or false
end
"""

# Takes one lock, or one of the permits of a name: that of the owner, else the first free one.
# KEYS     the lock of each, their queue, the counter of each
# ARGV     owner, ttl in ms, identity, 1 if fenced; to queue if refused: 0, or the arrival that was
#          returned before. Without it the owner leaves the queue.
# Returns  "token:which", the token 0 if unfenced; or of the lock that expires first {ms until then,
#          arrival, number of waiters before, handed, lock key}: handed has {which, owner, token, ms
#          since its last heartbeat} of each waiter that one was handed to, and {which} of readers
# An uncontended lock runs the first part alone. A newcomer doesn't get a free lock before the
# queue, but hands it to the first waiter.
ACQUIRE = Script(f"""
local owner, ttl, identity, fenced, arrival = unpack(ARGV)
local count = (#KEYS - 1) / 2
local lock, queue, counter = KEYS[1], KEYS[count + 1], KEYS[count + 2]
{_GRANT}
if redis.call('EXISTS', unpack(KEYS, 1, count + 1)) == 0 then return grant() .. ':1' end
local function choose(which)
  lock, counter = KEYS[which], KEYS[count + 1 + which]
end
local head, held, mine, free = owner .. ':', {{}}
for n = count, 1, -1 do
  held[n] = redis.pcall('GET', KEYS[n])
  if not held[n] then
    free = n
  elseif type(held[n]) == 'string' and string.sub(held[n], 1, #head) == head then
    mine = n
  end
end
if free and not mine and redis.call('EXISTS', queue) == 0 then
  choose(free)
  return grant() .. ':' .. free
end
{QUEUE}
{ENQUEUE}
local mailbox = queue .. ':' .. owner
if arrival and not mine then
  local permits = {{}}
  for n = 1, count do permits[n] = string.match(KEYS[n], '%d+$') end
  enqueue(permits[1] and ',' .. table.concat(permits, ',') .. ',')
end
local handed = {{}}
for n = 1, count do
  if not mine and not held[n] then
    choose(n)
    local first, alive, reader = first_alive()
    if first and first ~= owner then
      local given = hand_to(first, alive, reader)
      table.insert(given, 1, n)
      table.insert(handed, given)
    else
      mine = n
    end
  end
end
if mine or not arrival then
  leave_queue(owner)
  -- Otherwise RECHECK reads a message as proof that the owner still sleeps.
  redis.call('DEL', mailbox, mailbox .. ':')
end
if mine then
  choose(mine)
  return grant(held[mine] and string.match(held[mine], ':(%d+):')) .. ':' .. mine
end
local expires = -1
for n = 1, count do
  local left = redis.call('PTTL', KEYS[n])
  if left >= 0 and (expires < 0 or left < expires) then
    expires = left
    choose(n)
  end
end
{SHOW}
return {{expires, arrival or '', redis.call('ZRANK', queue, owner) or 0, handed, show()}}
""")

# Takes all locks or none. A lock with a live waiter is as good as held: it is handed over.
# KEYS     as in Keys, of each lock
# ARGV     ttl in ms; owner, identity and 1 if fenced of each lock
# Returns  of each lock its token, 0 if unfenced. If one was refused, what was found: {ms until it
#          expires, handed, lock key} of a refused lock, handed as in RELEASE; 1 if the owner had it
#          already, else 0
ACQUIRE_ALL = Script(f"""
local ttl = ARGV[1]
local lock, queue, counter, owner, identity, fenced
local function choose(n)
  lock, queue, counter = unpack(KEYS, 3 * n - 2, 3 * n)
  owner, identity, fenced = unpack(ARGV, 3 * n - 1, 3 * n + 1)
end
{_GRANT}
{QUEUE}
{SHOW}
local answers, tokens, refused = {{}}, {{}}, false
for n = 1, #KEYS / 3 do
  choose(n)
  local held, handed = show(), {{}}
  if not held and redis.call('EXISTS', queue) == 1 then
    local first, alive, reader = first_alive()
    if first and first ~= owner then
      handed = hand_to(first, alive, reader)
      held = show()
    end
  end
  local head = owner .. ':'
  answers[n] = 0
  if held and string.sub(held, 1, #head) == head then
    answers[n], tokens[n] = 1, string.match(held, ':(%d+):')
  elseif held then
    answers[n], refused = {{redis.call('PTTL', lock), handed, held}}, true
  end
end
if refused then return answers end
for n = 1, #KEYS / 3 do
  choose(n)
  if tokens[n] or redis.call('EXISTS', queue) == 1 then
    leave_queue(owner)
    redis.call('DEL', queue .. ':' .. owner, queue .. ':' .. owner .. ':')
  end
  answers[n] = grant(tokens[n])
end
return answers
""")

_RELEASE = f"""
local lock, queue, counter
local function release(owner, known)
  local head, held = owner .. ':', redis.pcall('GET', lock)
  local shared = type(held) == 'table'
  local mine = held and not shared and string.sub(held, 1, #head) == head
  if shared then
    local time = redis.call('TIME')
    redis.call('ZREMRANGEBYSCORE', lock, '-inf', time[1] * 1000 + math.floor(time[2] / 1000))
    mine = redis.call('ZREM', lock, string.sub(known, 2)) == 1
    for _, reader in ipairs(mine and {{}} or redis.call('ZRANGE', lock, 0, -1)) do
      if string.sub(reader, 1, #head) == head then mine = redis.call('ZREM', lock, reader) == 1 end
    end
  end
  local mailbox = queue .. ':' .. owner
  local had = 1
  if not mine then
    had = redis.call('ZREM', queue, owner)
    redis.call('ZREM', queue .. ':', owner)
    redis.call('DEL', mailbox, mailbox .. ':')
    if held then return had end
  end
  if string.sub(known, 1, 1) ~= '-' then
    local value = redis.call('GET', counter)
    local drawn, last = string.match(value or known, '^(%d+):(.*)$')
    if last == owner and (not value or known == '' or known == value) then had = 1 end
    if (last or owner) == owner then
      redis.call('SET', counter, (drawn or '0') .. ':', 'PX', {_COUNTER_TTL})
    end
  end
  if not mine then return had end
  if shared or redis.call('EXISTS', queue) == 1 then
    {DRAW}
    {QUEUE}
    if shared and any_reader() then return 1 end
    local first, alive, reader = first_alive()
    if first then return hand_to(first, alive, reader) end
  end
  redis.call('DEL', lock, mailbox, mailbox .. ':')
  return 1
end
"""

# KEYS     as in Keys
# ARGV     owner; the counter if no other owner came since: "" if unknown, "-" if unfenced; of a
#          reader "-" and what it has in the lock key
# Returns  1 if the owner had the lock or a place in the queue, else 0; or handed: {owner, token, ms
#          since its last heartbeat} of the waiter it was handed to, {} of readers
# An expired lease is the owner's if no other came since, as in RENEW. The owner leaves the counter:
# a renewal that arrives late must not bring the lock back.
RELEASE = Script(f"""
{_RELEASE}
lock, queue, counter = unpack(KEYS)
return release(ARGV[1], ARGV[2])
""")

# As RELEASE, of each lock.
RELEASE_ALL = Script(f"""
{_RELEASE}
local answers = {{}}
for n = 1, #KEYS / 3 do
  lock, queue, counter = unpack(KEYS, 3 * n - 2, 3 * n)
  answers[n] = release(ARGV[2 * n - 1], ARGV[2 * n])
end
return answers
""")

# Redis serves a client that is blocked on a mailbox before it runs any other command. If the
# message is still there, the waiter wasn't blocked. The message stays: it must wake a live waiter
# that was between two commands.
# KEYS     as in Keys
# ARGV     owner and token, as handed
# Returns  {} if the waiter has the lock or no other waits, else handed, as in RELEASE
RECHECK = Script(f"""
local lock, queue, counter = unpack(KEYS)
if redis.pcall('GET', lock) ~= ARGV[1] .. ':' .. ARGV[2] .. ':'
    or redis.call('EXISTS', queue .. ':' .. ARGV[1]) == 0 then
  return {{}}
end
{DRAW}
{QUEUE}
local owner, alive, reader = first_alive()
return owner and hand_to(owner, alive, reader) or {{}}
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
  elseif type(held) == 'table' then
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    if (tonumber(redis.pcall('ZSCORE', lock, value)) or 0) > now then
      redis.call('ZADD', lock, string.format('%.0f', now + ttl), value)
      -- The ttl may be shorter now: the key must not outlive its readers.
      redis.call('PEXPIREAT', lock, redis.call('ZREVRANGE', lock, 0, 0, 'WITHSCORES')[2])
      renewed = 1
    end
  elseif not held then
    local owner, token = string.match(value, '^([^:]*):([1-9]%d*):')
    local mine = owner and token .. ':' .. owner
    if mine and (redis.pcall('GET', counter) or mine) == mine then
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
# Returns  of each lock {number of waiters, value of the lock key, ms until it expires}; of a shared
#          lock the last two of each reader
LOOK = Script("""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = {}
for last = 2, #KEYS, 2 do
  local lock = KEYS[last - 1]
  local answer, held = {redis.call('ZCARD', KEYS[last])}, redis.pcall('GET', lock)
  if type(held) == 'table' then
    answer[2] = false
    for place, each in ipairs(redis.call('ZRANGEBYSCORE', lock, now, '+inf', 'WITHSCORES')) do
      answer[place + 1] = place % 2 == 1 and each or each - now
    end
  else
    answer[2], answer[3] = held, redis.call('PTTL', lock)
  end
  found[last / 2] = answer
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
