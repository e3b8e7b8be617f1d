-- The batches and the wait for what is due: `buffers/ledger/batches.py` in Lua.

-- As in `streamrl/types/buffer.py`.
local MAX_AWAITED = 8

local function check_take(num_groups, version, is_lent)
  local following = state.version + call('HLEN', key('loans')) - (is_lent and 1 or 0)
  if version ~= following then
    refuse('LedgerError', string.format(
      'take for version %d; the next to be trained is %d', version, following))
  end
  local capacity = admission_capacity()
  if num_groups > capacity then
    refuse('ConfigError', string.format('a batch of %d groups can never fill: '
      .. 'buffer.max_staleness %d and learner.groups_per_step %d admit %d',
      num_groups, state.max_staleness, state.groups_per_step, capacity))
  end
end

-- How many of the oldest finished groups a batch that lacks `num_missing` may get now, and, if it
-- waits for groups that are due, the newest `min_policy_version` of these; see
-- `buffers/ledger/batches.py`.
local function num_lendable(num_missing, version)
  if state.buffered < num_missing then return 0 end
  if state.overdue ~= WAIT then return num_missing end
  local lendable, num_steps, num_leased, newest_due = num_missing, 0, 0, nil
  repeat
    local newest = version + num_steps - state.max_staleness
    num_leased = call('ZCOUNT', key('leased'), '-inf', int(newest))
    local num_free = num_missing + num_steps * state.groups_per_step - num_leased
    if num_free < num_missing then newest_due = newest_due or newest end
    lendable = math.min(lendable, num_free)
    num_steps = num_steps + 1
  until num_leased == state.leased
  return math.max(0, lendable), newest_due
end

-- Of the groups that the batch would get, drop those that it may not train because their newest token
-- is too far ahead, until it would get none of them; how many it may get then.
local function drop_abandoned(num_missing, version)
  local newest = version + state.max_staleness
  while true do
    local lendable, has_dropped = num_lendable(num_missing, version), false
    local first = lendable > 0 and call('ZRANGE', key('ready'), 0, lendable - 1) or {}
    for _, prompt_index in ipairs(first) do
      local entry = get(tonumber(prompt_index))
      if entry.newest_version > newest then
        drop(entry, 'abandoned')
        has_dropped = true
      end
    end
    if not has_dropped then return lendable end
  end
end

-- The first leases, first due first, of the groups that are due and that the next batch waits for.
local function awaited_leases()
  local loan = prompt_indices_of(call('HGET', key('loans'), int(state.version)))
  local num_missing = state.groups_per_step - #loan
  local is_short = num_missing <= 0 or state.buffered < num_missing
  if is_short then return {} end
  local _, newest_due = num_lendable(num_missing, state.version)
  if not newest_due then return {} end
  local leases, newest = {}, int(newest_due)
  local due = call('ZRANGEBYSCORE', key('leased'), '-inf', newest, 'LIMIT', 0, MAX_AWAITED)
  for i, prompt_index in ipairs(due) do
    leases[i] = lease_fields(get(tonumber(prompt_index)))
  end
  return leases
end

local function wait_due_s(now_s)
  local waited_s = state.due_since_us == 0 and 0 or now_s - state.due_since_us / 1e6
  return string.format('%.17g', waited_s)
end

local function lend(num_groups, version, prompt_indices)
  for _ = 1, num_groups do
    local _, prompt_index = oldest()
    move(get(prompt_index), 'taken')
    prompt_indices[#prompt_indices + 1] = int(prompt_index)
  end
  if num_groups > 0 then
    call('HSET', key('loans'), int(version), table.concat(prompt_indices, ','))
  end
end

-- The whole loan; with `num_held` >= 0 a part of it, if that is longer.
local function take(num_groups, version, learner_term, num_held)
  require_learner_term(learner_term)
  local loan = prompt_indices_of(call('HGET', key('loans'), int(version)))
  local num_missing = num_groups - #loan
  if num_missing > 0 then
    check_take(num_groups, version, #loan > 0)
    evict(version)
    local lendable = drop_abandoned(num_missing, version)
    if lendable == num_missing or num_held >= 0 then lend(lendable, version, loan) end
  end
  if #loan < num_groups and (num_held < 0 or #loan <= num_held) then return {} end
  local headers = {}
  for i, prompt_index in ipairs(loan) do
    headers[i] = call('HGET', key('headers'), prompt_index)
  end
  return headers
end
