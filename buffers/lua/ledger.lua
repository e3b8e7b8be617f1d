-- Admission, eviction, loans and fencing: `buffers/ledger.py`, in Lua.
--
-- Invariant: those stated there; `tests/contract/test_redis_equals_ledger.py` holds the two to the
-- same answers and the same books. A refusal leaves what its method did before raising there.

local function refuse(kind, message)
  error({ kind = kind, message = message })
end

local function count_refused(reason)
  call('HINCRBY', key('refused'), reason, 1)
end

local function in_line()
  return state.leased + state.buffered + state.taken
end

local function check_epoch(epoch)
  if epoch < state.epoch then
    refuse('FencedError', string.format(
      'this learner is of epoch %d; epoch %d took over', epoch, state.epoch))
  elseif epoch > state.epoch then
    refuse('LostMemoryError', string.format(
      'lost memory: this buffer knows epoch %d, not %d', state.epoch, epoch))
  end
end

local function sequences_of(batch)
  local sequences = {}
  for sequence in string.gmatch(batch or '', '%d+') do sequences[#sequences + 1] = sequence end
  return sequences
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

local function admits()
  local room = (state.max_staleness + 1) * state.groups_per_step
  if state.final_version >= 0 then
    room = math.min(room, (state.final_version - state.version) * state.groups_per_step)
  end
  -- A rest that fills no batch would wait in line for good.
  local is_closed = state.draining == 1 and in_line() % state.groups_per_step == 0
  return state.epoch > 0 and state.finished == 0 and not is_closed and in_line() < room
end

local function lease(lease_id, now_s, ttl_s)
  expire(now_s)
  local entry = find(lease_id)
  if entry or not admits() then return entry end
  local trained_at = state.version + math.floor(in_line() / state.groups_per_step)
  return grant(lease_id, math.max(0, trained_at - state.max_staleness), now_s + ttl_s)
end

local function reassert(lease_id, sequence, floor, now_s, ttl_s)
  expire(now_s)
  if not find(lease_id) then grant_again(sequence, lease_id, floor, now_s + ttl_s) end
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

-- Whether the payload must be kept.
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
  elseif group.sequence ~= entry.sequence then
    refuse('LedgerError', string.format('lease %s is for sequence %s; the group says %s',
      lease_id, int(entry.sequence), int(group.sequence)))
  elseif state.version - group.oldest_version > state.max_staleness then
    drop(entry, 'stale')
    return false
  end
  for name, value in pairs(group) do entry[name] = value end
  call('HSET', key('headers'), int(entry.sequence), header)
  move(entry, 'buffered')
  state.num_bytes = state.num_bytes + entry.num_bytes
  return true
end

local function release(lease_id, reason)
  local entry = find(lease_id)
  if entry and entry.state == 'leased' then drop(entry, reason) end
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
  local first = call('ZRANGE', key('waiting'), 0, 0, 'WITHSCORES')
  if first[1] then return tonumber(first[2]), tonumber(first[1]) end
end

local function evict(version)
  local oldest_version, sequence = oldest()
  while oldest_version and version - oldest_version > state.max_staleness do
    drop(get(sequence), 'stale')
    oldest_version, sequence = oldest()
  end
end

-- Acknowledge what was trained at versions <= `version`.
local function settle(version)
  for _, trained_at in ipairs(versions_of('trained')) do
    if trained_at <= version then
      local batch = call('HGET', key('trained'), int(trained_at))
      for _, sequence in ipairs(sequences_of(batch)) do acknowledge_entry(get(sequence)) end
      call('HDEL', key('trained'), int(trained_at))
    end
  end
end

local function attach(version, books)
  local is_older = books and not follows(books)
  settle(version)
  for _, name in ipairs({ 'loans', 'trained' }) do
    for _, batch in ipairs(call('HVALS', key(name))) do
      for _, sequence in ipairs(sequences_of(batch)) do move(get(sequence), 'buffered') end
    end
    call('DEL', key(name))
  end
  if books and (is_older or state.version < version) then
    adopt(books)
  elseif books then
    reconcile(books)
  end
  state.version, state.finished, state.draining = version, 0, 0
  state.epoch = math.max(state.epoch, books and books.epoch or 0) + 1
  news.room, news.groups = true, true
end

local function check_take(num_groups, version)
  local following = state.version + call('HLEN', key('loans'))
  if version ~= following then
    refuse('LedgerError', string.format(
      'take for version %d; the next to be trained is %d', version, following))
  end
  local capacity = (state.max_staleness + 1) * state.groups_per_step
  if num_groups > capacity then
    refuse('ConfigError', string.format('a batch of %d groups can never fill: '
      .. 'buffer.max_staleness %d and learner.groups_per_step %d admit %d',
      num_groups, state.max_staleness, state.groups_per_step, capacity))
  end
end

local function take(num_groups, version, epoch)
  check_epoch(epoch)
  local loan = call('HGET', key('loans'), int(version))
  if not loan then
    check_take(num_groups, version)
    evict(version)
    if state.buffered < num_groups then return {} end
    local sequences = {}
    for i = 1, num_groups do
      local _, sequence = oldest()
      move(get(sequence), 'taken')
      sequences[i] = int(sequence)
    end
    loan = table.concat(sequences, ',')
    call('HSET', key('loans'), int(version), loan)
  end
  local headers = {}
  for i, sequence in ipairs(sequences_of(loan)) do
    headers[i] = call('HGET', key('headers'), sequence)
  end
  return headers
end

local function advance(version, epoch)
  check_epoch(epoch)
  if version == state.version then return end
  local loan = call('HGET', key('loans'), int(state.version))
  if version ~= state.version + 1 or not loan then
    refuse('LedgerError', string.format(
      'advance to %d: the ledger is at %d and has lent for [%s]',
      version, state.version, table.concat(versions_of('loans'), ', ')))
  end
  for _, sequence in ipairs(sequences_of(loan)) do move(get(sequence), 'trained') end
  call('HDEL', key('loans'), int(state.version))
  call('HSET', key('trained'), int(version), loan)
  state.version = version
  evict(version)
end

local function acknowledge(version, epoch)
  check_epoch(epoch)
  if version > state.version then
    refuse('LedgerError', string.format(
      'acknowledge of version %d; the ledger is at %d', version, state.version))
  end
  settle(version)
end
