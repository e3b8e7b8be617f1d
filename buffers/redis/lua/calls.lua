-- The calls of a client, each one atomic: `buffers/ledger/state.py` and
-- `buffers/ledger/generator_registry.py` in Lua.
--
--   ARGV   call, time or '', ttl_s, groups_per_step, max_staleness, final_version or -1,
--          place of `overdue` in OverduePolicy, arguments
--   reply  {'ok', ...}, {name of an error class, message}, {'again'}: the staged payload is gone,
--          {'full'}: no memory, or {'schema', number}: the run's keys have another schema
--
-- The time is this server's clock (TIME), which all clients of a run share, also after a restart; a
-- test passes its own. Redis replicates the effects of a script, not its source, so a script may
-- read the clock.

local function now()
  if ARGV[2] ~= '' then return tonumber(ARGV[2]) end
  local time = call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end

-- As in `buffers/ledger/generator_registry.py`.
local MAX_REPLACED = 8
-- Longer than the network keeps a request that its client has given up.
local REPEATED_S = 3600
-- As in `streamrl/types/buffer.py`.
local MAX_RETRIED, MIN_RETRIED_LEASES = 4, 3

local now_s, ttl_s = now(), tonumber(ARGV[3])
local settings = {
  groups_per_step = tonumber(ARGV[4]),
  max_staleness = tonumber(ARGV[5]),
  final_version = tonumber(ARGV[6]),
  overdue = tonumber(ARGV[7]),
  schema = SCHEMA,
}

local function read_books()
  local numbers = {}
  for i, name in ipairs(NUMBERS) do numbers[i] = { name, int(state[name]) } end
  return numbers, call('HGETALL', key('dropped')), call('ZRANGE', key('in_flight'), 0, -1),
    call('ZRANGE', key('free'), 0, -1)
end

local function end_session(session, reason)
  for _, lease_id in ipairs(call('ZRANGE', key('expiries'), 0, -1)) do
    if string.match(lease_id, '^[^/]*') == session then release(lease_id, reason) end
  end
end

local function remove_silent_generators()
  local registry = call('HGETALL', key('registry'))
  for i = 1, #registry, 2 do
    if now_s - cmsgpack.unpack(registry[i + 1]).seen_s > ttl_s then
      call('HDEL', key('registry'), registry[i])
    end
  end
end

-- The id of the server's process: a restarted one may have lost changes.
local function incarnation()
  local server = redis.pcall('INFO', 'server')
  return type(server) == 'string' and string.match(server, 'run_id:(%w+)') or ''
end

-- Prompts and their leases that ended without a group, most leases first.
local function retried()
  return call('ZREVRANGEBYSCORE', key('retried'), '+inf', MIN_RETRIED_LEASES, 'WITHSCORES',
    'LIMIT', 0, MAX_RETRIED)
end

local function read_stats()
  local registry, ages = call('HVALS', key('registry')), {}
  for i, packed in ipairs(registry) do
    local report = cmsgpack.unpack(packed)
    registry[i], ages[i] = report.status, string.format('%.17g', now_s - report.seen_s)
  end
  local last_heartbeat_s = tonumber(call('GET', key('last_heartbeat_s')) or now_s)
  local numbers, dropped, in_flight_prompts, free = read_books()
  return {
    'ok', numbers, dropped, in_flight_prompts, free, call('HGETALL', key('refused')),
    oldest() or '', incarnation(), registry, ages, call('HGETALL', key('scheduling_states')),
    call('HGETALL', key('lengths')), awaited_leases(), wait_due_s(now_s), retried(),
    string.format('%.17g', now_s - last_heartbeat_s),
  }
end

local calls = {}

-- New leases that one call may be granted: this generator's share of what is admitted, none if its
-- weights are another learner's.
local function share(generator_id, learner_id)
  local present = call('GET', key('learner_id')) or ''
  if learner_id ~= '' and present ~= '' and learner_id ~= present then return 0 end
  if call('HEXISTS', key('scheduling_states'), generator_id) == 1 then return 0 end
  return math.ceil(num_admitted() / math.max(1, call('HLEN', key('registry'))))
end

-- The leases, and where there are none, when the next one of somebody expires.
function calls.lease(generator_id, learner_id, ...)
  expire(now_s)
  local num_new, leases = share(generator_id, learner_id), {}
  for _, lease_id in ipairs({ ... }) do
    local entry = find(lease_id)
    if not entry and num_new > 0 then
      entry = lease(lease_id, now_s, ttl_s)
      num_new = num_new - 1
    end
    if entry then
      leases[#leases + 1] = lease_fields(entry)
    end
  end
  local first = #leases == 0 and call('ZRANGE', key('expiries'), 0, 0, 'WITHSCORES')[2]
  return { 'ok', leases, first and string.format('%.17g', tonumber(first) - now_s) or '' }
end

-- A large payload is sent ahead under a key of its own, so that Lua does not copy it.
function calls.put(token, payload, lease_id, header, ...)
  local group_id, prompt_index, oldest_version, newest_version, num_bytes, response_lengths = ...
  local staged = key('staged:' .. token)
  if payload == '' and call('EXISTS', staged) == 0 then return { 'again' } end
  local is_kept, kept = pcall(put, lease_id, {
    group_id = group_id,
    prompt_index = tonumber(prompt_index),
    oldest_version = tonumber(oldest_version),
    newest_version = tonumber(newest_version),
    num_bytes = tonumber(num_bytes),
    response_lengths = response_lengths,
  }, header, now_s)
  if is_kept and kept then
    call('RENAME', staged, key('payload:' .. prompt_index))
    if payload == '' then call('PERSIST', key('payload:' .. prompt_index)) end
  else
    call('UNLINK', staged)
  end
  if not is_kept then error(kept) end
  return { 'ok' }
end

function calls.release(lease_id, reason, response_lengths)
  release(lease_id, reason, response_lengths)
  return { 'ok' }
end

function calls.refuse_malformed(lease_id)
  refuse_malformed(lease_id)
  return { 'ok' }
end

-- A generator has reported, or a learner attached, which needs one from now on.
local function hear()
  call('SET', key('last_heartbeat_s'), string.format('%.17g', now_s))
end

-- Store the report; `known` is the one before it.
local function store_report(known, generator_id, session, status)
  local replaced = known and known.replaced or {}
  if known and known.session ~= session then
    replaced[#replaced + 1] = known.session
    if #replaced > MAX_REPLACED then table.remove(replaced, 1) end
    end_session(known.session, 'expired')
  end
  local report = { session = session, seen_s = now_s, status = status, replaced = replaced }
  call('HSET', key('registry'), generator_id, cmsgpack.pack(report))
  hear()
end

local function remove_generator(generator_id, session)
  end_session(session, 'released')
  call('HDEL', key('registry'), generator_id)
  if call('HGET', key('scheduling_states'), generator_id) == 'draining' then
    call('HDEL', key('scheduling_states'), generator_id)
  end
end

local function fences(known, session)
  for _, replaced in ipairs(known and known.replaced or {}) do
    if replaced == session then return true end
  end
  return false
end

function calls.heartbeat(generator_id, session, is_leaving, status, held, ...)
  local packed = call('HGET', key('registry'), generator_id)
  local known = packed and cmsgpack.unpack(packed)
  local is_fenced = fences(known, session)
  if is_fenced then
    end_session(session, 'expired')
  else
    for _, lease in ipairs(cmsgpack.unpack(held)) do
      reassert(lease[1], lease[2], lease[3], now_s, ttl_s)
    end
    store_report(known, generator_id, session, status)
    if is_leaving == '1' then remove_generator(generator_id, session) end
  end
  local lost = renew({ ... }, now_s, ttl_s)
  local scheduling_state = call('HGET', key('scheduling_states'), generator_id) or 'active'
  return {
    'ok', state.version, state.finished, lost, incarnation(), scheduling_state,
    is_fenced and 1 or 0, state.learner_term, call('GET', key('learner_id')) or '',
  }
end

-- Whether this id is known; if not, all ids that are.
function calls.set_scheduling_state(generator_id, scheduling_state)
  local known = {}
  for _, name in ipairs({ 'registry', 'scheduling_states' }) do
    if call('HEXISTS', key(name), generator_id) == 1 then
      call('HDEL', key('scheduling_states'), generator_id)
      if scheduling_state ~= 'active' then
        call('HSET', key('scheduling_states'), generator_id, scheduling_state)
      end
      notify.may_lease = true
      return { 'ok', 1, {} }
    end
    for _, other in ipairs(call('HKEYS', key(name))) do known[#known + 1] = other end
  end
  return { 'ok', 0, known }
end

-- A repeated call gets the term of the first: a second one would fence the learner that has it.
function calls.attach(version, books, call_id, learner_id)
  local known = key('attached:' .. call_id)
  local learner_term = call('GET', known)
  if not learner_term then
    for name, value in pairs(settings) do state[name] = value end
    attach(tonumber(version), books ~= '' and cmsgpack.unpack(books))
    learner_term = state.learner_term
    call('SET', key('learner_id'), learner_id)
    call('SET', known, int(learner_term), 'EX', REPEATED_S)
  end
  hear()
  return { 'ok', tonumber(learner_term), { unpack(read_stats(), 2) } }
end

function calls.take(num_groups, version, learner_term, num_held)
  num_groups = tonumber(num_groups)
  local headers = take(num_groups, tonumber(version), tonumber(learner_term), tonumber(num_held))
  local waited_s = wait_due_s(now_s)
  if #headers >= num_groups then
    state.due_since_us = 0
  elseif state.due_since_us == 0 and #awaited_leases() > 0 then
    state.due_since_us = math.floor(now_s * 1e6)
  end
  return { 'ok', headers, waited_s }
end

function calls.advance(version, learner_term)
  advance(tonumber(version), tonumber(learner_term))
  return calls.stats()
end

function calls.acknowledge(version, learner_term)
  acknowledge(tonumber(version), tonumber(learner_term))
  return { 'ok' }
end

function calls.finish(learner_term)
  require_learner_term(tonumber(learner_term))
  state.finished = 1
  return { 'ok' }
end

function calls.drain()
  state.draining = 1
  return { 'ok' }
end

function calls.stats()
  expire(now_s)
  remove_silent_generators()
  return read_stats()
end

load_state(settings)
if stored.version and stored.schema ~= SCHEMA then
  return { 'schema', stored.schema or 1 }
end
if ARGV[1] == 'put' and ARGV[9] ~= '' then
  -- Short of memory, Redis refuses only the first write of a script, so this one comes first.
  local stored_it = redis.pcall('SET', key('staged:' .. ARGV[8]), ARGV[9])
  if stored_it.err and string.find(stored_it.err, 'OOM') then return { 'full' } end
  if stored_it.err then return stored_it end
end
-- A write that adds nothing: after it Redis lets the script finish even if memory is short.
call('DEL', key('nothing'))
local is_done, reply = pcall(calls[ARGV[1]], unpack(ARGV, 8))
if not is_done then
  if type(reply) ~= 'table' or not reply.kind then error(reply) end
  reply = { reply.kind, reply.message }
end
save_state()
if notify.may_lease or notify.may_take then
  -- A user who may not publish loses the notification, not the call.
  redis.pcall('PUBLISH', key('changed'),
    string.format('%d %d %d', notify.may_lease and 1 or 0, state.buffered, state.learner_term))
end
return reply
