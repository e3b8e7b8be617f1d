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
--   standings hash    generator -> standing, unless active
--   history   stream  one event per change of an entry

local call = redis.call
local prefix = string.match(KEYS[1], '^(.*:)state$')

local NUMBERS = {
  'version', 'epoch', 'finished', 'groups_per_step', 'max_staleness', 'final_version', 'granted',
  'leased', 'buffered', 'taken', 'trained', 'acknowledged', 'next_sequence', 'revision',
  'num_bytes', 'draining', 'unseen',
}
local RETURNS_SEQUENCE = { expired = true, released = true, orphaned = true }

-- As in `buffers/account.py`.
local MAX_GAP = 100000

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

local function open_lease(sequence, lease_id, floor, expires_at_s)
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

local function grant(lease_id, floor, expires_at_s)
  local returned = call('ZPOPMIN', key('returned'))[1]
  local sequence = tonumber(returned or state.next_sequence)
  if not returned then state.next_sequence = sequence + 1 end
  return open_lease(sequence, lease_id, floor, expires_at_s)
end

-- A lease that its holder asserts and this account forgot, if its sequence is free.
local function grant_again(sequence, lease_id, floor, expires_at_s)
  if call('ZREM', key('returned'), int(sequence)) == 0 then
    local following = state.next_sequence
    if sequence < following or sequence >= following + MAX_GAP then return end
    for skipped = following, sequence - 1 do
      call('ZADD', key('returned'), int(skipped), int(skipped))
      record({ sequence = skipped, lease_id = '' }, 'dropped', 'orphaned')
    end
    state.next_sequence = sequence + 1
  end
  open_lease(sequence, lease_id, floor, expires_at_s)
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

local function acknowledge_entry(entry, by_books)
  close(entry)
  state.acknowledged = state.acknowledged + 1
  record(entry, 'acknowledged', by_books and 'books')
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

local function sequences_in(name)
  local sequences = {}
  for _, sequence in ipairs(call('ZRANGE', key(name), 0, -1)) do
    sequences[tonumber(sequence)] = true
  end
  return sequences
end

local function return_sequences(sequences)
  call('DEL', key('returned'))
  for sequence in pairs(sequences) do
    call('ZADD', key('returned'), int(sequence), int(sequence))
  end
end

-- Sequences in `mine` and not in `others` end without a lease: a learner's books say so.
local function record_by_books(mine, others, name, reason)
  local ended = {}
  for sequence in pairs(mine) do
    if not others[sequence] then ended[#ended + 1] = sequence end
  end
  table.sort(ended)
  for _, sequence in ipairs(ended) do record({ sequence = sequence, lease_id = '' }, name, reason) end
end

-- Whether this may be the account of these books at a later time; see `Account.follows`.
local function follows(books)
  if state.epoch < books.epoch then return false end
  if state.epoch == books.epoch and state.revision < books.revision then return false end
  for reason, count in pairs(books.dropped) do
    if tonumber(call('HGET', key('dropped'), reason) or 0) < count then return false end
  end
  return true
end

-- Come to the account of a learner's checkpoint from a later one; see `Account.reconcile`.
local function reconcile(books)
  local unfinished, free = {}, {}
  for _, run in ipairs(books.open_runs) do
    for sequence = run[1], run[2] - 1 do unfinished[sequence] = true end
  end
  for sequence = books.next_sequence, state.next_sequence - 1 do unfinished[sequence] = true end
  for sequence in pairs(unfinished) do free[sequence] = true end
  for _, entry in ipairs(entries_in_line()) do
    if not unfinished[entry.sequence] then acknowledge_entry(entry, true) end
    free[entry.sequence] = nil
  end
  local was_free = sequences_in('returned')
  record_by_books(free, was_free, 'dropped', 'orphaned')
  for sequence = state.next_sequence, books.next_sequence - 1 do was_free[sequence] = true end
  record_by_books(was_free, unfinished, 'acknowledged', 'books')
  return_sequences(free)
  state.next_sequence = math.max(state.next_sequence, books.next_sequence)
end

-- Continue the account of a checkpoint that is later than this one; see `Account.adopt`.
local function adopt(books)
  reconcile(books)
  local seen = state.granted - state.unseen
  state.granted = books.granted + call('ZCARD', key('line'))
  state.unseen = state.granted - seen
  state.acknowledged = books.acknowledged + books.trained
  call('DEL', key('dropped'))
  for reason, count in pairs(books.dropped) do call('HINCRBY', key('dropped'), reason, count) end
  local in_flight = books.leased + books.buffered + books.taken
  if in_flight > 0 then call('HINCRBY', key('dropped'), 'orphaned', in_flight) end
  state.revision = math.max(state.revision, books.revision)
end
