-- The ledger's columns in Redis, and the only code that changes them: `buffers/account.py`, in Lua.
--
-- Invariant: as there, an entry enters and leaves a column in one place each, so the books close
-- after every call. The three files of this folder are loaded as one script, in the order account,
-- ledger, calls; KEYS[1] is `streamrl:{RUN}:state`, and every other key shares its hash tag and so
-- its cluster slot.
--
--   state     hash    counts, version, epoch, settings       entries   hash  sequence -> entry
--   leases    hash    lease id -> sequence                   line      zset  leased, buffered, taken
--   expiries  zset    leased: lease id by time               waiting   zset  buffered: by version
--   returned  zset    sequences to be granted again          dropped, refused  hash  reason -> count
--   loans, trained    hash  version -> sequences             roster    hash  generator -> report
--   headers   hash    sequence -> header of its group        payload:SEQUENCE, staged:TOKEN
--   history   stream  one event per change of an entry

local call = redis.call
local prefix = string.match(KEYS[1], '^(.*:)state$')

local NUMBERS = {
  'version', 'epoch', 'finished', 'groups_per_step', 'max_staleness', 'final_version', 'granted',
  'leased', 'buffered', 'taken', 'trained', 'acknowledged', 'next_sequence', 'revision',
  'num_bytes',
}
local RETURNS_SEQUENCE = { expired = true, released = true, orphaned = true }

local state, stored = {}, {}
-- What those who wait are told: more leases may be granted, more groups may be taken.
local news = { room = false, groups = false }

local function key(name)
  return prefix .. name
end

-- Lua's own conversion loses digits above 1e14.
local function int(number)
  return string.format('%.0f', number)
end

local function load_state(settings)
  -- A write that adds nothing: after one, Redis lets a script finish even where memory is short.
  call('DEL', key('nothing'))
  local values = call('HMGET', KEYS[1], unpack(NUMBERS))
  for i, name in ipairs(NUMBERS) do
    stored[name] = tonumber(values[i])
    state[name] = stored[name] or settings[name] or 0
  end
end

local function save_state()
  local changed = {}
  for _, name in ipairs(NUMBERS) do
    if state[name] ~= stored[name] then
      changed[#changed + 1] = name
      changed[#changed + 1] = int(state[name])
    end
  end
  if #changed > 0 then call('HSET', KEYS[1], unpack(changed)) end
end

local function record(entry, name, reason)
  call('XADD', key('history'), '*', 'sequence', int(entry.sequence), 'state', name,
    'reason', reason or '', 'lease_id', entry.lease_id)
end

-- Members of equal score are ordered as text.
local function in_waiting(sequence)
  return string.format('%016.0f', sequence)
end

local function store(entry)
  call('HSET', key('entries'), int(entry.sequence), cmsgpack.pack(entry))
end

local function get(sequence)
  local packed = call('HGET', key('entries'), int(sequence))
  return packed and cmsgpack.unpack(packed)
end

local function find(lease_id)
  local sequence = call('HGET', key('leases'), lease_id)
  return sequence and get(sequence)
end

local function enter(entry, column)
  local from, member = entry.state, int(entry.sequence)
  entry.state = column
  state[column] = state[column] + 1
  if column == 'trained' then
    call('ZREM', key('line'), member)
  elseif not from or from == 'trained' then
    call('ZADD', key('line'), member, member)
  end
  if column == 'leased' then
    call('ZADD', key('expiries'), string.format('%.17g', entry.expires_at_s), entry.lease_id)
  elseif column == 'buffered' then
    call('ZADD', key('waiting'), int(entry.oldest_version), in_waiting(entry.sequence))
    news.groups = true
  end
end

local function leave(entry)
  state.revision = state.revision + 1
  state[entry.state] = state[entry.state] - 1
  if entry.state == 'leased' then
    call('ZREM', key('expiries'), entry.lease_id)
  elseif entry.state == 'buffered' then
    call('ZREM', key('waiting'), in_waiting(entry.sequence))
  end
end

local function grant(lease_id, floor, expires_at_s)
  local returned = call('ZPOPMIN', key('returned'))[1]
  local sequence = tonumber(returned or state.next_sequence)
  if not returned then state.next_sequence = sequence + 1 end
  local entry =
    { sequence = sequence, lease_id = lease_id, floor = floor, expires_at_s = expires_at_s }
  enter(entry, 'leased')
  store(entry)
  call('HSET', key('leases'), lease_id, int(sequence))
  state.granted = state.granted + 1
  state.revision = state.revision + 1
  record(entry, 'leased')
  return entry
end

local function move(entry, column)
  leave(entry)
  enter(entry, column)
  store(entry)
  record(entry, column)
  news.room = news.room or column == 'trained'
end

local function close(entry)
  leave(entry)
  call('ZREM', key('line'), int(entry.sequence))
  call('HDEL', key('entries'), int(entry.sequence))
  call('HDEL', key('leases'), entry.lease_id)
  if entry.group_id then
    call('HDEL', key('headers'), int(entry.sequence))
    call('UNLINK', key('payload:' .. int(entry.sequence)))
    state.num_bytes = state.num_bytes - entry.num_bytes
  end
  news.room = true
end

local function acknowledge_entry(entry)
  close(entry)
  state.acknowledged = state.acknowledged + 1
  record(entry, 'acknowledged')
end

local function drop(entry, reason)
  close(entry)
  call('HINCRBY', key('dropped'), reason, 1)
  if RETURNS_SEQUENCE[reason] then
    call('ZADD', key('returned'), int(entry.sequence), int(entry.sequence))
  end
  record(entry, 'dropped', reason)
end

local function entries_in_line()
  local entries = {}
  for i, sequence in ipairs(call('ZRANGE', key('line'), 0, -1)) do entries[i] = get(sequence) end
  return entries
end

local function return_sequences(sequences)
  call('DEL', key('returned'))
  for sequence in pairs(sequences) do
    call('ZADD', key('returned'), int(sequence), int(sequence))
  end
end

-- Come to the account of a learner's checkpoint from a later one; see `Account.reconcile`.
local function reconcile(books)
  local unfinished, held = {}, {}
  for _, sequence in ipairs(books.open_sequences) do unfinished[sequence] = true end
  for _, entry in ipairs(entries_in_line()) do
    if entry.sequence < books.next_sequence and not unfinished[entry.sequence] then
      acknowledge_entry(entry)
    else
      held[entry.sequence] = true
    end
  end
  for sequence = books.next_sequence, state.next_sequence - 1 do unfinished[sequence] = true end
  for sequence in pairs(held) do unfinished[sequence] = nil end
  return_sequences(unfinished)
  state.next_sequence = math.max(state.next_sequence, books.next_sequence)
end

-- Continue the account of a checkpoint that is later than this one; see `Account.adopt`.
local function adopt(books)
  for _, entry in ipairs(entries_in_line()) do
    close(entry)
    record(entry, 'dropped', 'orphaned')
  end
  state.granted = books.granted
  state.acknowledged = books.acknowledged + books.trained
  call('DEL', key('dropped'))
  for reason, count in pairs(books.dropped) do call('HINCRBY', key('dropped'), reason, count) end
  local in_flight = books.leased + books.buffered + books.taken
  if in_flight > 0 then call('HINCRBY', key('dropped'), 'orphaned', in_flight) end
  local unfinished = {}
  for _, sequence in ipairs(books.open_sequences) do unfinished[sequence] = true end
  return_sequences(unfinished)
  state.next_sequence = books.next_sequence
  state.revision = math.max(state.revision, books.revision)
end
