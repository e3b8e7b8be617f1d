-- The lengths of responses by outcome: `buffers/ledger/response_counter.py` in Lua.

-- As in `streamrl/types/lengths.py`.
local function rounded_length(length)
  local _, num_bits = math.frexp(length)
  local width = 2 ^ math.max(0, num_bits - 4)
  return math.floor(length / width) * width + math.floor(width / 2)
end

-- Count the responses of a group, `sign` 1, or no longer, -1.
local function count_lengths(outcome, response_lengths, sign)
  local num_tokens, counts = 0, {}
  for _, length in ipairs(cmsgpack.unpack(response_lengths)) do
    local rounded = rounded_length(length)
    counts[rounded] = (counts[rounded] or 0) + sign
    num_tokens = num_tokens + length * sign
  end
  for length, count in pairs(counts) do
    call('HINCRBY', key('lengths'), outcome .. ':' .. int(length), count)
  end
  call('HINCRBY', key('lengths'), outcome .. ':tokens', int(num_tokens))
end
