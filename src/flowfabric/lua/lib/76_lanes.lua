-- Lane settings: the deployment's own in the slot of the lane registry, a copy in each partition.

-- The fields that differ in a partition's copy: what creates and claims look at. A lane that has
-- none of them has no copy, so that its claims stay cheap.
local DEFAULTS = {
  state = 'active', reason = '', priority_weight_ms = '1000000000000', reclaim_grace_ms = '0',
  emit_renewals = '0',
}
-- How many earlier placements of a lane are remembered.
local EARLIER_MAX = 8

-- The number of partitions on which a lane's executions are created.
local function shards_of(config, partitions)
  if config.placement ~= 'spread' then return '1' end
  return config.shards or partitions
end

-- What submitters need to know: version, shards, then `<shards>:<until ms>` of earlier placements.
local function remember_placement(tag, lane, config, before, now)
  local key = K.index(tag, 'placements')
  local known = server.call('HGET', key, lane)
  if not known and before == config.spread_over then return end
  local earlier = known and string.match(known, '^%d+ %d+(.*)$') or ''
  if before ~= config.spread_over then
    earlier = ' ' .. before .. ':' .. values.text(now) .. earlier
    local count = 0
    earlier = string.gsub(earlier, ' %S+', function(entry)
      count = count + 1
      return count <= EARLIER_MAX and entry or ''
    end)
  end
  server.call('HSET', key, lane, config.version .. ' ' .. config.spread_over .. earlier)
end

-- Stores settings of a lane (name, value pairs from `first` on). Returns the state before and all
-- settings. A repeated request gets the same answer and has no second effect.
function lanes.store(tag, lane, partitions, request, args, first)
  local key, now = K.lane_config(tag, lane), clock.now()
  local config, fields = values.fields(server.call('HGETALL', key)), {}
  local known, answered = string.match(config.request or '', '^(%S+) (%S+)$')
  if known == request then return answered, config end
  local state, shards = config.state or 'active', config.spread_over or '1'
  for i = first, #args, 2 do
    local name, value = args[i], args[i + 1]
    config[name] = value ~= '' and value or nil
    if value == '' then server.call('HDEL', key, name) else values.add(fields, name, value) end
    if name == 'state' then
      config.changed_at = values.text(now)
      values.add(fields, 'changed_at', config.changed_at)
    end
  end
  config.version = values.text(tonumber(config.version or 0) + 1)
  config.spread_over = shards_of(config, partitions)
  values.append(fields, { 'version', config.version, 'spread_over', config.spread_over,
    'request', request .. ' ' .. state })
  server.call('HSET', key, unpack(fields))
  remember_placement(tag, lane, config, shards, now)
  return state, config
end

-- Each lane of the pairs (number, lane) in `args` that has a placement, followed by it.
function lanes.placements(tag, args)
  local key, found = K.index(tag, 'placements'), {}
  for i = 3, #args, 2 do
    local placement = server.call('HGET', key, args[i])
    if placement then values.append(found, { args[i], placement }) end
  end
  return found
end

-- The version, the shards, and the settings that a partition's copy has.
function lanes.copied(config)
  local copy = { config.version or '0', config.spread_over or '1' }
  for name, default in pairs(DEFAULTS) do
    local value = config[name]
    if value and value ~= default then values.append(copy, { name, value }) end
  end
  return copy
end

-- The indexes of claimable work of a lane.
local function waiting_indexes(c, lane)
  local names = { K.eligible(c.tag, lane), K.reclaimable(c.tag, lane) }
  for _, signature in ipairs(server.call('SMEMBERS', K.lane(c.tag, lane, 'sigs'))) do
    values.append(names, { K.eligible(c.tag, lane, signature), K.reclaimable(c.tag, lane, signature) })
  end
  return indexes.existing(names)
end

-- Has all that waits in a lane scored anew, in steps.
local function score_again(c, lane)
  local marks = K.index(c.tag, 'rescore')
  for _, name in ipairs(waiting_indexes(c, lane)) do server.call('HSET', marks, name, '0') end
end

-- Whether the partition knows this version of a lane's settings or a newer one.
local function is_newer(placed, version)
  return tonumber(server.call('HGET', placed, 'version') or 0) > tonumber(version)
end

-- Stores where the lane's executions are created; false if a newer version is known.
function lanes.place(c, lane, version, shards)
  local placed = K.lane(c.tag, lane, 'placed')
  if is_newer(placed, version) then return false end
  server.call('HSET', placed, 'version', version, 'spread_over', shards)
  return true
end

-- Replaces the partition's copy by settings (name, value from `first` on); see `lanes.copied`.
function lanes.copy(c, lane, version, shards, args, first)
  if not lanes.place(c, lane, version, shards) then return end
  local weight, key = c:lane(lane).weight, K.lane(c.tag, lane, 'config')
  server.call('DEL', key)
  for i = first, #args, 2 do server.call('HSET', key, args[i], args[i + 1]) end
  c.lanes[lane] = nil
  if c:lane(lane).weight ~= weight then score_again(c, lane) end
  waiting.ring_all(c, lane)
end

local function score_of(c, id)
  local rec = record.read(c, id)
  return rec and tonumber(c:score(rec))
end

-- Scores some executions of one marked index anew. Returns how many it looked at.
local function score_some(c, marks, name, cursor, limit)
  local readable, page = try(server.call, 'ZSCAN', name, cursor, 'COUNT', limit)
  if not readable then page = { '0', {} } end
  local changed = {}
  for i = 1, #page[2], 2 do
    local ok, score = try(score_of, c, page[2][i])
    if ok and score and score ~= tonumber(page[2][i + 1]) then
      values.append(changed, { score, page[2][i] })
    end
  end
  for first, last in values.pieces(changed) do
    server.call('ZADD', name, unpack(changed, first, last))
  end
  if page[1] == '0' then
    server.call('HDEL', marks, name)
  else
    server.call('HSET', marks, name, page[1])
  end
  return #page[2] / 2
end

-- Scores about `limit` executions anew. Returns how many, and whether more are left. A step that is
-- repeated changes nothing.
function lanes.rescore(c, limit)
  local marks, done = K.index(c.tag, 'rescore'), 0
  while done < limit do
    local mark = server.call('HRANDFIELD', marks, 1, 'WITHVALUES')
    if #mark == 0 then return done, 0 end
    done = done + 1 + score_some(c, marks, mark[1], mark[2], limit)
  end
  return done, server.call('EXISTS', marks)
end
