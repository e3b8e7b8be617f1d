-- Admission, eviction, loans and fencing: `buffers/ledger/ledger.py` and `admission.py` in Lua.
--
-- Invariant: those stated there; `tests/contract/test_redis_equals_ledger.py` tests that both give
-- the same answers and keep the same books. A refusal keeps the changes that were made before it.

local function refuse(kind, message)
  error({ kind = kind, message = message })
end

local function count_refused(reason)
  call('HINCRBY', key('refused'), reason, 1)
end

local function in_flight()
  return state.leased + state.buffered + state.taken
end

local function require_learner_term(learner_term)
  if learner_term < state.learner_term then
    refuse('FencedError', string.format(
      'this learner is of term %d; term %d took over', learner_term, state.learner_term))
  elseif learner_term > state.learner_term then
    refuse('LostMemoryError', string.format(
      'lost memory: this buffer knows term %d, not %d', state.learner_term, learner_term))
  end
end

-- The places of these policies in OverduePolicy; the third one is drop.
local WAIT, TRAIN = 0, 1

local function prompt_indices_of(loan)
  local prompt_indices = {}
  for prompt_index in string.gmatch(loan or '', '%d+') do
    prompt_indices[#prompt_indices + 1] = prompt_index
  end
  return prompt_indices
end

local function versions_of(name)
  local versions = {}
  for i, version in ipairs(call('HKEYS', key(name))) do versions[i] = tonumber(version) end
  table.sort(versions)
  return versions
end

-- The generators' side.

local function expire(now_s)
  local overdue =
    call('ZRANGEBYSCORE', key('expiries'), '-inf', string.format('%.17g', now_s))
  for _, lease_id in ipairs(overdue) do drop(find(lease_id), 'expired') end
end

local function admission_capacity()
  return (state.max_staleness + 1) * state.groups_per_step
end

local function num_admitted()
  if state.learner_term == 0 or state.finished == 1 then return 0 end
  local capacity = admission_capacity()
  if state.final_version >= 0 then
    capacity = math.min(capacity, (state.final_version - state.version) * state.groups_per_step)
  end
  local free = math.max(0, capacity - in_flight())
  -- Groups that fill no batch would stay in flight for good.
  return state.draining == 1 and math.min(free, -in_flight() % state.groups_per_step) or free
end

-- Whether a group is too old to be trained at `version`, and is dropped for it.
local function is_stale(oldest_version, version)
  return state.overdue ~= TRAIN and version - oldest_version > state.max_staleness
end

local function lease(lease_id, now_s, ttl_s)
  expire(now_s)
  local entry = find(lease_id)
  if entry or num_admitted() == 0 then return entry end
  local trained_at = state.version + math.floor(in_flight() / state.groups_per_step)
  return grant(lease_id, math.max(0, trained_at - state.max_staleness), now_s + ttl_s)
end

-- A lease as replies have it.
local function lease_fields(entry)
  return {
    entry.lease_id, entry.prompt_index, entry.min_policy_version,
    string.format('%.17g', entry.expires_at_s),
  }
end

local function reassert(lease_id, prompt_index, min_policy_version, now_s, ttl_s)
  expire(now_s)
  if not find(lease_id) then
    grant_again(prompt_index, lease_id, min_policy_version, now_s + ttl_s)
  end
end

local function renew(lease_ids, now_s, ttl_s)
  expire(now_s)
  local lost = {}
  for _, lease_id in ipairs(lease_ids) do
    local entry = find(lease_id)
    if not entry then
      lost[#lost + 1] = lease_id
    elseif entry.state == 'leased' and now_s + ttl_s > entry.expires_at_s then
      entry.expires_at_s = now_s + ttl_s
      store(entry)
      call('ZADD', key('expiries'), string.format('%.17g', entry.expires_at_s), lease_id)
    end
  end
  return lost
end

-- Take the group in; whether its payload must be kept.
local function put(lease_id, group, header, now_s)
  expire(now_s)
  local entry = find(lease_id)
  if not entry then
    count_refused('unknown_lease')
    refuse('UnknownLeaseError',
      string.format('lease %s is unknown here, or has expired', lease_id))
  elseif entry.group_id then
    if entry.group_id == group.group_id then return false end
    count_refused('duplicate')
    refuse('DuplicateGroupError',
      string.format('lease %s already holds %s', lease_id, entry.group_id))
  elseif group.prompt_index ~= entry.prompt_index then
    refuse('LedgerError', string.format('lease %s is for prompt %s; the group is for %s',
      lease_id, int(entry.prompt_index), int(group.prompt_index)))
  elseif is_stale(group.oldest_version, state.version) then
    drop(entry, 'stale', group)
    return false
  end
  for name, value in pairs(group) do entry[name] = value end
  call('HSET', key('headers'), int(entry.prompt_index), header)
  move(entry, 'buffered')
  state.num_bytes = state.num_bytes + entry.num_bytes
  return true
end

-- `response_lengths` (msgpack) are those of a group that was sampled and is not put; '' or nil if
-- there is none.
local function release(lease_id, reason, response_lengths)
  local entry = find(lease_id)
  local has_lengths = response_lengths and response_lengths ~= ''
  local put = has_lengths and { response_lengths = response_lengths }
  if entry and entry.state == 'leased' then drop(entry, reason, put) end
end

local function refuse_malformed(lease_id)
  local entry = find(lease_id)
  if entry and entry.state == 'leased' then
    drop(entry, 'malformed')
  else
    count_refused('malformed')
  end
end

-- The learner's side.

local function oldest()
  local first = call('ZRANGE', key('ready'), 0, 0, 'WITHSCORES')
  if first[1] then return tonumber(first[2]), tonumber(first[1]) end
end

local function evict(version)
  local oldest_version, prompt_index = oldest()
  while oldest_version and is_stale(oldest_version, version) do
    drop(get(prompt_index), 'stale')
    oldest_version, prompt_index = oldest()
  end
end

-- Acknowledge what was trained at versions <= `version`.
local function settle(version)
  for _, trained_at in ipairs(versions_of('trained')) do
    if trained_at <= version then
      local loan = call('HGET', key('trained'), int(trained_at))
      for _, prompt_index in ipairs(prompt_indices_of(loan)) do
        acknowledge_entry(get(prompt_index))
      end
      call('HDEL', key('trained'), int(trained_at))
    end
  end
end

-- As in `buffers/ledger/proportion.py`.
local MAX_REOPENED, MAX_LOST = 2 ^ 18, 2 ^ 40

local function require_proportion(books)
  local columns = books.leased + books.buffered + books.taken + books.trained + books.acknowledged
  for _, count in pairs(books.dropped) do columns = columns + count end
  if columns ~= books.granted then
    refuse('LedgerError', string.format(
      'books: do not close: %.0f leases were granted, %.0f are accounted for',
      books.granted, columns))
  end
  for _, name in ipairs({ 'granted', 'next_prompt_index', 'revision', 'learner_term' }) do
    if books[name] > state[name] + MAX_LOST then
      refuse('LedgerError', string.format(
        'books.%s: is %.0f; this buffer has %.0f', name, books[name], state[name]))
    end
  end
  local reopened = math.max(0, state.next_prompt_index - books.next_prompt_index)
  for _, range in ipairs(books.open_ranges) do reopened = reopened + range[2] - range[1] end
  if reopened > MAX_REOPENED then
    refuse('LedgerError', string.format(
      'books: %.0f prompts would be granted again; this buffer reopens at most %.0f: start the '
      .. "run's keys anew, and it starts from the learner's checkpoint", reopened, MAX_REOPENED))
  end
end

local function attach(version, books)
  if books then require_proportion(books) end
  local is_older = books and not follows(books)
  settle(version)
  for _, name in ipairs({ 'loans', 'trained' }) do
    for _, loan in ipairs(call('HVALS', key(name))) do
      for _, prompt_index in ipairs(prompt_indices_of(loan)) do
        move(get(prompt_index), 'buffered')
      end
    end
    call('DEL', key(name))
  end
  if books and (is_older or state.version < version) then
    adopt(books)
  elseif books then
    reconcile(books)
  end
  state.version, state.finished, state.draining = version, 0, 0
  state.due_since_us = 0
  state.learner_term = math.max(state.learner_term, books and books.learner_term or 0) + 1
  notify.may_lease, notify.may_take = true, true
end

local function advance(version, learner_term)
  require_learner_term(learner_term)
  if version == state.version then return end
  local loan = call('HGET', key('loans'), int(state.version))
  if version ~= state.version + 1 or not loan then
    refuse('LedgerError', string.format(
      'advance to %d: the ledger is at %d and has lent for [%s]',
      version, state.version, table.concat(versions_of('loans'), ', ')))
  end
  for _, prompt_index in ipairs(prompt_indices_of(loan)) do move(get(prompt_index), 'trained') end
  call('HDEL', key('loans'), int(state.version))
  call('HSET', key('trained'), int(version), loan)
  state.version = version
  evict(version)
end

local function acknowledge(version, learner_term)
  require_learner_term(learner_term)
  if version > state.version then
    refuse('LedgerError', string.format(
      'acknowledge of version %d; the ledger is at %d', version, state.version))
  end
  settle(version)
end
