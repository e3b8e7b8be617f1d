-- The ledger's columns in Redis, and the only code that changes them: `buffers/ledger/entries.py`, in Lua.
--
-- Invariant: as there, an entry enters and leaves a column in one place each, so the books close
-- after every call. The three files of this folder are loaded as one script, in the order account,
-- ledger, calls; KEYS[1] is `streamrl:{RUN}:state`, and every other key shares its hash tag and so
-- its cluster slot.
--
--   state     hash    counts, version, term, settings       entries   hash  prompt -> entry
--   leases    hash    lease id -> prompt                   line      zset  leased, buffered, taken
--   expiries  zset    leased: lease id by time               waiting   zset  buffered: by version
--   returned  zset    prompts to be granted again          dropped, refused  hash  reason -> count
--   loans, trained    hash  version -> prompts             generator registry    hash  generator -> report
--   headers   hash    prompt -> header of its group        payload:PROMPT_INDEX, staged:TOKEN
--   scheduling states hash    generator -> scheduling state, unless active
--   history   stream  one event per change of an entry

local call = redis.call
local prefix = string.match(KEYS[1], '^(.*:)state$')

local NUMBERS = {
  'schema', 'version', 'learner_term', 'finished', 'groups_per_step', 'max_staleness', 'final_version', 'granted',
  'leased', 'buffered', 'taken', 'trained', 'acknowledged', 'next_prompt_index', 'revision',
  'num_bytes', 'draining', 'unseen',
}
local RETURNS_PROMPT = { expired = true, released = true, orphaned = true }

-- As in `buffers/ledger/entries.py`.
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
  call('XADD', key('history'), '*', 'prompt_index', int(entry.prompt_index), 'state', name,
    'reason', reason or '', 'lease_id', entry.lease_id)
end

-- Members of equal score are ordered as text.
local function in_waiting(prompt_index)
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
    call('ZREM', key('line'), member)
  elseif not from or from == 'trained' then
    call('ZADD', key('line'), member, member)
  end
  if column == 'leased' then
    call('ZADD', key('expiries'), string.format('%.17g', entry.expires_at_s), entry.lease_id)
  elseif column == 'buffered' then
    call('ZADD', key('waiting'), int(entry.oldest_version), in_waiting(entry.prompt_index))
    news.groups = true
  end
end

local function leave(entry)
  state.revision = state.revision + 1
  state[entry.state] = state[entry.state] - 1
  if entry.state == 'leased' then
    call('ZREM', key('expiries'), entry.lease_id)
  elseif entry.state == 'buffered' then
    call('ZREM', key('waiting'), in_waiting(entry.prompt_index))
  end
end

local function open_lease(prompt_index, lease_id, min_policy_version, expires_at_s)
  local entry =
    { prompt_index = prompt_index, lease_id = lease_id, min_policy_version = min_policy_version, expires_at_s = expires_at_s }
  enter(entry, 'leased')
  store(entry)
  call('HSET', key('leases'), lease_id, int(prompt_index))
  state.granted = state.granted + 1
  state.revision = state.revision + 1
  record(entry, 'leased')
  return entry
end

local function grant(lease_id, min_policy_version, expires_at_s)
  local returned = call('ZPOPMIN', key('returned'))[1]
  local prompt_index = tonumber(returned or state.next_prompt_index)
  if not returned then state.next_prompt_index = prompt_index + 1 end
  return open_lease(prompt_index, lease_id, min_policy_version, expires_at_s)
end

-- A lease that its holder asserts and this account forgot, if its prompt is free.
local function grant_again(prompt_index, lease_id, min_policy_version, expires_at_s)
  if call('ZREM', key('returned'), int(prompt_index)) == 0 then
    local following = state.next_prompt_index
    if prompt_index < following or prompt_index >= following + MAX_GAP then return end
    for skipped = following, prompt_index - 1 do
      call('ZADD', key('returned'), int(skipped), int(skipped))
      record({ prompt_index = skipped, lease_id = '' }, 'dropped', 'orphaned')
    end
    state.next_prompt_index = prompt_index + 1
  end
  open_lease(prompt_index, lease_id, min_policy_version, expires_at_s)
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
  call('ZREM', key('line'), int(entry.prompt_index))
  call('HDEL', key('entries'), int(entry.prompt_index))
  call('HDEL', key('leases'), entry.lease_id)
  if entry.group_id then
    call('HDEL', key('headers'), int(entry.prompt_index))
    call('UNLINK', key('payload:' .. int(entry.prompt_index)))
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
  if RETURNS_PROMPT[reason] then
    call('ZADD', key('returned'), int(entry.prompt_index), int(entry.prompt_index))
  end
  record(entry, 'dropped', reason)
end

local function entries_in_line()
  local entries = {}
  for i, prompt_index in ipairs(call('ZRANGE', key('line'), 0, -1)) do entries[i] = get(prompt_index) end
  return entries
end

local function prompt_indices_in(name)
  local prompt_indices = {}
  for _, prompt_index in ipairs(call('ZRANGE', key(name), 0, -1)) do
    prompt_indices[tonumber(prompt_index)] = true
  end
  return prompt_indices
end

local function return_prompts(prompt_indices)
  call('DEL', key('returned'))
  for prompt_index in pairs(prompt_indices) do
    call('ZADD', key('returned'), int(prompt_index), int(prompt_index))
  end
end

-- Prompts in `mine` and not in `others` end without a lease: a learner's books say so.
local function record_by_books(mine, others, name, reason)
  local ended = {}
  for prompt_index in pairs(mine) do
    if not others[prompt_index] then ended[#ended + 1] = prompt_index end
  end
  table.sort(ended)
  for _, prompt_index in ipairs(ended) do record({ prompt_index = prompt_index, lease_id = '' }, name, reason) end
end

-- Whether this may be the account of these books at a later time; see `Entries.follows`.
local function follows(books)
  if state.learner_term < books.learner_term then return false end
  if state.learner_term == books.learner_term and state.revision < books.revision then return false end
  for reason, count in pairs(books.dropped) do
    if tonumber(call('HGET', key('dropped'), reason) or 0) < count then return false end
  end
  return true
end

-- Come to the account of a learner's checkpoint from a later one; see `Entries.reconcile`.
local function reconcile(books)
  local unfinished, free = {}, {}
  for _, run in ipairs(books.open_ranges) do
    for prompt_index = run[1], run[2] - 1 do unfinished[prompt_index] = true end
  end
  for prompt_index = books.next_prompt_index, state.next_prompt_index - 1 do unfinished[prompt_index] = true end
  for prompt_index in pairs(unfinished) do free[prompt_index] = true end
  for _, entry in ipairs(entries_in_line()) do
    if not unfinished[entry.prompt_index] then acknowledge_entry(entry, true) end
    free[entry.prompt_index] = nil
  end
  local was_free = prompt_indices_in('returned')
  record_by_books(free, was_free, 'dropped', 'orphaned')
  for prompt_index = state.next_prompt_index, books.next_prompt_index - 1 do was_free[prompt_index] = true end
  record_by_books(was_free, unfinished, 'acknowledged', 'books')
  return_prompts(free)
  state.next_prompt_index = math.max(state.next_prompt_index, books.next_prompt_index)
end

-- Continue the account of a checkpoint that is later than this one; see `Entries.adopt`.
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
