"""The Lua scripts of shared locks that no other lock needs."""

from __future__ import annotations

from ..interface import SHARED
from .scripts import DRAW, ENQUEUE, QUEUE, SHOW, Script

# Takes a shared lock, which readers have together.
# KEYS     as in Keys
# ARGV     as in ACQUIRE
# Returns  as ACQUIRE, with the token SHARED; nothing is to be rechecked: a reader that was let in
#          and died delays a writer as long as a claim
# A newcomer doesn't pass a writer that waits. All readers before the next writer are let in.
ACQUIRE_SHARED = Script(f"""
local owner, ttl, identity, fenced, arrival = unpack(ARGV)
local lock, queue, counter = unpack(KEYS)
{DRAW}
{QUEUE}
{ENQUEUE}
{SHOW}
local reader = owner .. ':{SHARED}:' .. identity
local held = redis.pcall('GET', lock)
if type(held) == 'table' and not any_reader() then held = false end
local function has()
  return type(redis.pcall('GET', lock)) == 'table' and redis.call('ZSCORE', lock, reader)
end
local mine = has()
if not mine and redis.call('EXISTS', queue) == 0 and type(held) ~= 'string' then mine = true end
local handed = {{}}
if not mine then
  if arrival then enqueue(reader) end
  if type(held) ~= 'string' then
    local first, alive, reads = first_alive()
    if first and (reads or not held) then
      handed = hand_to(first, alive, reads)
      first = first_alive()
    end
    mine = has() or (not first and type(redis.pcall('GET', lock)) ~= 'string')
  end
end
if mine or not arrival then
  leave_queue(owner)
  redis.call('DEL', queue .. ':' .. owner, queue .. ':' .. owner .. ':')
end
if mine then
  if fenced == '1' or redis.call('EXISTS', counter) == 1 then draw('{SHARED}') end
  let_in(reader, ttl)
  return '{SHARED}:1'
end
if handed[1] then handed = {{{{1, unpack(handed)}}}} end
local before = redis.call('ZRANK', queue, owner) or 0
return {{redis.call('PTTL', lock), arrival or '', before, handed, show()}}
""")

# KEYS     lock
# ARGV     what the reader has in the lock key
# Returns  1 if its lease hasn't ended, else 0
HOLDS_SHARED = Script("""
local time = redis.call('TIME')
local ends = tonumber(redis.pcall('ZSCORE', KEYS[1], ARGV[1])) or 0
return ends > time[1] * 1000 + time[2] / 1000 and 1 or 0
""")
