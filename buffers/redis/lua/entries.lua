-- The ledger's columns: `buffers/ledger/entries.py` in Lua.
--
-- Invariant: as there, an entry enters and leaves a column in one place each, so the books close
-- after every call.

local RETURNS_PROMPT = { expired = true, released = true, orphaned = true, abandoned = true }

-- As in `buffers/ledger/entries.py`.
local MAX_GAP = 100000

-- Count the leases of a prompt that ended without a group; see `buffers/retries.py`.
local function count_retries(entry, name, reason)
  local member = string.format('%016.0f', entry.prompt_index)
  if name == 'dropped' and RETURNS_PROMPT[reason] then
    if entry.lease_id ~= '' then call('ZINCRBY', key('retried'), 1, member) end
  elseif name == 'dropped' or name == 'buffered' or name == 'acknowledged' then
    call('ZREM', key('retried'), member)
  end
end

-- `response_lengths` (msgpack) are those of a group that is put.
local function record(entry, name, reason, response_lengths)
  count_retries(entry, name, reason)
  call('XADD', key('events'), '*', 'prompt_index', int(entry.prompt_index), 'state', name,
    'reason', reason or '', 'lease_id', entry.lease_id,
    'response_lengths', response_lengths or '')
end

-- Members of equal score are ordered as text.
local function ready_member(prompt_index)
  return string.format('%016.0f', prompt_index)
end

local function store(entry)
  call('HSET', key('entries'), int(entry.prompt_index), cmsgpack.pack(entry))
end

local function get(prompt_index)
  local packed = call('HGET', key('entries'), int(prompt_index))
  return packed and cmsgpack.unpack(packed)
end

local function find(lease_id)
  local prompt_index = call('HGET', key('leases'), lease_id)
  return prompt_index and get(prompt_index)
end

local function enter(entry, column)
  local from, member = entry.state, int(entry.prompt_index)
  entry.state = column
  state[column] = state[column] + 1
  if column == 'trained' then
    call('ZREM', key('in_flight'), member)
  elseif not from or from == 'trained' then
    call('ZADD', key('in_flight'), member, member)
  end
  if column == 'leased' then
    call('ZADD', key('expiries'), string.format('%.17g', entry.expires_at_s), entry.lease_id)
    call('ZADD', key('leased'), int(entry.min_policy_version), ready_member(entry.prompt_index))
  elseif column == 'buffered' then
    call('ZADD', key('ready'), int(entry.oldest_version), ready_member(entry.prompt_index))
    notify.may_take = true
  end
end

local function leave(entry)
  state.revision = state.revision + 1
  state[entry.state] = state[entry.state] - 1
  if entry.state == 'leased' then
    call('ZREM', key('expiries'), entry.lease_id)
    call('ZREM', key('leased'), ready_member(entry.prompt_index))
  elseif entry.state == 'buffered' then
    call('ZREM', key('ready'), ready_member(entry.prompt_index))
  end
end

local function open_lease(prompt_index, lease_id, min_policy_version, expires_at_s)
  local entry = {
    prompt_index = prompt_index,
    lease_id = lease_id,
    min_policy_version = min_policy_version,
    expires_at_s = expires_at_s,
  }
  enter(entry, 'leased')
  store(entry)
  call('HSET', key('leases'), lease_id, int(prompt_index))
  state.granted = state.granted + 1
  state.revision = state.revision + 1
  record(entry, 'leased')
  return entry
end

local function grant(lease_id, min_policy_version, expires_at_s)
  local free = call('ZPOPMIN', key('free'))[1]
  local prompt_index = tonumber(free or state.next_prompt_index)
  if not free then state.next_prompt_index = prompt_index + 1 end
  return open_lease(prompt_index, lease_id, min_policy_version, expires_at_s)
end

-- A lease that its holder reasserts and this ledger forgot, if its prompt is free.
local function grant_again(prompt_index, lease_id, min_policy_version, expires_at_s)
  if call('ZREM', key('free'), int(prompt_index)) == 0 then
    local following = state.next_prompt_index
    local limit = following + MAX_GAP - call('ZCARD', key('free'))
    if prompt_index < following or prompt_index >= limit then return end
    for skipped = following, prompt_index - 1 do
      call('ZADD', key('free'), int(skipped), int(skipped))
      record({ prompt_index = skipped, lease_id = '' }, 'dropped', 'orphaned')
    end
    state.next_prompt_index = prompt_index + 1
  end
  open_lease(prompt_index, lease_id, min_policy_version, expires_at_s)
end

local function move(entry, column)
  local is_put = entry.state == 'leased'
  if is_put then
    count_lengths('sampled', entry.response_lengths, 1)
  elseif entry.state == 'trained' then
    count_lengths('trained', entry.response_lengths, -1)
  end
  if column == 'trained' then count_lengths('trained', entry.response_lengths, 1) end
  leave(entry)
  enter(entry, column)
  store(entry)
  record(entry, column, nil, is_put and entry.response_lengths)
  notify.may_lease = notify.may_lease or column == 'trained'
end

local function close(entry)
  leave(entry)
  call('ZREM', key('in_flight'), int(entry.prompt_index))
  call('HDEL', key('entries'), int(entry.prompt_index))
  call('HDEL', key('leases'), entry.lease_id)
  if entry.group_id then
    call('HDEL', key('headers'), int(entry.prompt_index))
    call('UNLINK', key('payload:' .. int(entry.prompt_index)))
    state.num_bytes = state.num_bytes - entry.num_bytes
  end
  notify.may_lease = true
end

local function acknowledge_entry(entry, by_books)
  if entry.response_lengths and entry.state ~= 'trained' then
    count_lengths('trained', entry.response_lengths, 1)
  end
  close(entry)
  state.acknowledged = state.acknowledged + 1
  record(entry, 'acknowledged', by_books and 'books')
end

-- `put` is a group that is dropped instead of taken in.
local function drop(entry, reason, put)
  local response_lengths = put and put.response_lengths or entry.response_lengths
  if put then count_lengths('sampled', response_lengths, 1) end
  if response_lengths then count_lengths(reason, response_lengths, 1) end
  close(entry)
  call('HINCRBY', key('dropped'), reason, 1)
  if RETURNS_PROMPT[reason] then
    call('ZADD', key('free'), int(entry.prompt_index), int(entry.prompt_index))
  end
  record(entry, 'dropped', reason, put and response_lengths)
end

local function entries_in_flight()
  local entries = {}
  for i, prompt_index in ipairs(call('ZRANGE', key('in_flight'), 0, -1)) do
    entries[i] = get(prompt_index)
  end
  return entries
end

local function prompt_indices_in(name)
  local prompt_indices = {}
  for _, prompt_index in ipairs(call('ZRANGE', key(name), 0, -1)) do
    prompt_indices[tonumber(prompt_index)] = true
  end
  return prompt_indices
end

local function set_free(prompt_indices)
  call('DEL', key('free'))
  for prompt_index in pairs(prompt_indices) do
    call('ZADD', key('free'), int(prompt_index), int(prompt_index))
  end
end

-- Prompts in `mine` and not in `others` end by a learner's books instead of a lease.
local function record_by_books(mine, others, name, reason)
  local ended = {}
  for prompt_index in pairs(mine) do
    if not others[prompt_index] then ended[#ended + 1] = prompt_index end
  end
  table.sort(ended)
  for _, prompt_index in ipairs(ended) do
    record({ prompt_index = prompt_index, lease_id = '' }, name, reason)
  end
end

-- Whether this ledger may be at a later state than the books; see `Entries.follows`.
local function follows(books)
  local is_same_term = state.learner_term == books.learner_term
  if state.learner_term < books.learner_term then return false end
  if is_same_term and state.revision < books.revision then return false end
  for reason, count in pairs(books.dropped) do
    if tonumber(call('HGET', key('dropped'), reason) or 0) < count then return false end
  end
  return true
end

-- Go back from a later state to the books of a learner's checkpoint; see `Entries.reconcile`.
local function reconcile(books)
  local unfinished, free = {}, {}
  for _, range in ipairs(books.open_ranges) do
    for prompt_index = range[1], range[2] - 1 do unfinished[prompt_index] = true end
  end
  for prompt_index = books.next_prompt_index, state.next_prompt_index - 1 do
    unfinished[prompt_index] = true
  end
  for prompt_index in pairs(unfinished) do free[prompt_index] = true end
  for _, entry in ipairs(entries_in_flight()) do
    if not unfinished[entry.prompt_index] then acknowledge_entry(entry, true) end
    free[entry.prompt_index] = nil
  end
  local was_free = prompt_indices_in('free')
  record_by_books(was_free, unfinished, 'acknowledged', 'books')
  if books.next_prompt_index > state.next_prompt_index then
    local last = { prompt_index = books.next_prompt_index - 1, lease_id = '' }
    record(last, 'acknowledged', 'books')
  end
  record_by_books(free, was_free, 'dropped', 'orphaned')
  set_free(free)
  state.next_prompt_index = math.max(state.next_prompt_index, books.next_prompt_index)
end

-- Continue from the books of a checkpoint that are later than this ledger; see `Entries.adopt`.
local function adopt(books)
  reconcile(books)
  local seen = state.granted - state.unseen
  state.granted = books.granted + call('ZCARD', key('in_flight'))
  state.unseen = state.granted - seen
  state.acknowledged = books.acknowledged + books.trained
  call('DEL', key('dropped'))
  for reason, count in pairs(books.dropped) do call('HINCRBY', key('dropped'), reason, count) end
  local in_flight = books.leased + books.buffered + books.taken
  if in_flight > 0 then call('HINCRBY', key('dropped'), 'orphaned', in_flight) end
  state.revision = math.max(state.revision, books.revision)
end
