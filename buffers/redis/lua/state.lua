-- The keys of a run, and its numbers, which a call loads first and saves last.
--
-- The six files of this folder are loaded as one script, in the order state, lengths, entries,
-- ledger, batches, calls, after a line that sets SCHEMA. KEYS[1] is `streamrl:{RUN}:state`; every
-- other key has the same hash tag and so the same cluster slot.
--
--   state              hash    schema, counts, version, learner term, settings
--   entries            hash    prompt index -> entry
--   leases             hash    lease id -> prompt index
--   in_flight          zset    prompt indices that are leased, buffered or taken
--   expiries           zset    lease ids that are leased, by expiry time
--   ready              zset    prompt indices that are buffered, by oldest version
--   leased             zset    prompt indices that are leased, by oldest version that may sample
--   free               zset    prompt indices that are granted again
--   loans, trained     hash    version -> prompt indices
--   headers            hash    prompt index -> header of its group
--   payload:INDEX      string  payload of a group;  staged:TOKEN  one that its put has sent ahead
--   dropped, refused   hash    reason -> count
--   lengths            hash    OUTCOME:LENGTH -> responses, OUTCOME:tokens -> their tokens; the
--                              outcomes: sampled, trained, and the reasons of drops
--   retried            zset    prompt indices without a group, by leases that ended without one
--   registry           hash    generator id -> last report
--   scheduling_states  hash    generator id -> scheduling state, unless active
--   learner_id         string  of the learner that attached last
--   last_heartbeat_s   string  when any generator reported last
--   events             stream  one event per change of an entry

local call = redis.call
local prefix = string.match(KEYS[1], '^(.*:)state$')

local NUMBERS = {
  'schema', 'version', 'learner_term', 'finished', 'draining', 'groups_per_step', 'max_staleness',
  'final_version', 'granted', 'leased', 'buffered', 'taken', 'trained', 'acknowledged',
  'next_prompt_index', 'revision', 'num_bytes', 'unseen', 'overdue', 'due_since_us',
}

local state, stored = {}, {}
-- What the channel `changed` is notified of: a lease may be granted, a group may be taken.
local notify = { may_lease = false, may_take = false }

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
