-- ff_oldest_eligible: since when the longest-waiting claimable execution of each lane is claimable.
-- On a single server one call may name many partitions; in a cluster each gets its own.
-- Keys: the lanes' eligible indexes, core. Arguments: per partition: tag, number of lanes, lanes.
-- Replies: the time, then per lane a list: '' and then signatures, each followed by the earliest time
--   in its index or empty. For as many lanes as fit into one call; the caller asks for the others
--   again.
-- Errors: none.

-- How many steps of the search a lane may cost in a partition, how many each index gets at least, and
-- how many entries of a priority are read at once.
local MAX_STEPS, MIN_STEPS, PAGE = 256, 12, 16
local TIMES = { 'created_at', 'last_transition_at', 'started_at', 'attempt_started_at', 'resumed_at',
  'completed_at' }

-- When an execution last changed its state; nil if it is gone.
local function claimable_since(tag, id)
  local latest
  for _, time in ipairs(server.call('HMGET', K.core(tag, id), unpack(TIMES))) do
    time = tonumber(time or nil)
    if time and (not latest or time > latest) then latest = time end
  end
  return latest
end

local function look(seen, id)
  seen.left = seen.left - 1
  local readable, since = try(claimable_since, seen.tag, id)
  if readable and since and since < seen.since then seen.since = since end
end

local function text_of(number) return string.format('%.0f', number) end

-- Looks at the executions of one priority. They come in the order of their creation, and nothing is
-- claimable before it is created: one created later than the oldest found ends the search.
local function look_through(seen, low, shift)
  local offset, count = 0, 1
  while seen.left > 0 do
    local page = server.call('ZRANGE', seen.key, '(' .. text_of(low), '+inf', 'BYSCORE',
      'LIMIT', offset, count, 'WITHSCORES')
    for i = 1, #page, 2 do
      if tonumber(page[i + 1]) + shift >= seen.since or seen.left <= 0 then return end
      look(seen, page[i])
    end
    if #page < 2 * count then return end
    offset, count = offset + count, PAGE
  end
end

-- Goes through the priorities from the lowest, which starves first, to the highest. A priority has
-- the scores of one weight's width; only scores below the oldest time can belong to an older one.
local function oldest(seen, now, weight)
  local first = server.call('ZRANGE', seen.key, 0, 0)
  if #first == 0 then return false end
  look(seen, first[1])
  local below = '(' .. text_of(seen.since)
  while seen.left > 0 do
    local last = server.call('ZRANGE', seen.key, below, '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, 1,
      'WITHSCORES')
    if #last == 0 then break end
    seen.left = seen.left - 1
    local priority = math.floor((now - tonumber(last[2])) / weight)
    local low = now - (priority + 1) * weight
    look_through(seen, low, priority * weight)
    below = low < seen.since and text_of(low) or '(' .. text_of(seen.since)
  end
  return true
end

local function weight_of(lane_part)
  local readable, stored = try(server.call, 'HGET', lane_part .. 'config', 'priority_weight_ms')
  return tonumber(readable and stored or nil) or Context.DEFAULTS.weight
end

local function signatures_of(lane_part)
  local readable, signatures = try(waiting.signatures, lane_part .. 'sigs')
  return readable and signatures or {}
end

local function times_of(tag, lane, now)
  local lane_part, times, cost = indexes.of_lane(tag, lane), {}, 0
  local weight, signatures = weight_of(lane_part), signatures_of(lane_part)
  local most = math.max(MIN_STEPS, math.floor(MAX_STEPS / (#signatures + 1)))
  for i = 0, #signatures do
    local signature = signatures[i] or ''
    local key = lane_part .. 'eligible' .. (signature ~= '' and ':' .. signature or '')
    local seen = { tag = tag, key = key, since = now, left = most }
    local readable, is_used = try(oldest, seen, now, weight)
    values.append(times, { signature, readable and is_used and text_of(seen.since) or '' })
    cost = cost + 2 + most - seen.left
  end
  return times, cost
end

register('ff_oldest_eligible', function(_, args)
  local now = clock.now()
  return reply.ok(text_of(now), indexes.of_places(args, function(tag, lane)
    return times_of(tag, lane, now)
  end))
end, { 'no-writes' })
