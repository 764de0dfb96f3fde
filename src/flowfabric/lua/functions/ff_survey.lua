-- ff_survey: fingerprints of the indexes of partitions, so that unchanged records need not be read
-- again. On a single server one call may name many partitions; in a cluster each gets its own.
-- Keys: every index, core. Arguments: per partition: tag, whether to look at its own indexes
--   (1 | 0), number of lanes, lanes, number of indexes that existed before, their names (after
--   `ff:idx:T:`).
-- Replies: per partition [tag, fingerprint, names of the indexes that exist], for as many
--   partitions as fit into one call; the caller asks for the others again.
--   The fingerprint changes with every entry added, removed or scored anew; for an index with very
--   many entries, only with their number. Lease renewals do not change it. Errors: none.

-- The largest index whose entries are read, and the number of entries that one call reads.
local SMALL, AT_ONCE = 500, 5000
-- Opening an index costs as much as reading this many entries.
local READ = 10

local function is_lease_index(key)
  return string.find(key, ':lease_expiry$') or string.find(key, ':active$')
end

-- The ids of an index, or nil if there are too many, and its content as text.
local function entries(seen, key)
  local most = math.min(SMALL, seen.room.left)
  local flat = server.call('ZRANGE', key, 0, most, 'WITHSCORES')
  if #flat > 2 * most then
    seen.large = true
    return nil, 'many ' .. server.call('ZCARD', key)
  end
  seen.room.left = math.max(0, seen.room.left - #flat / 2)
  local ids = {}
  for i = 1, #flat, 2 do ids[#ids + 1] = flat[i] end
  if not is_lease_index(key) then return ids, table.concat(flat, ' ') end
  table.sort(ids)
  return ids, table.concat(ids, ' ')
end

local function content_of(seen, key)
  if string.find(key, ':config$') then
    return server.call('HGET', key, 'priority_weight_ms') or 'default'
  elseif string.find(key, ':sigs$') then
    local signatures, lane = waiting.signatures(key), string.sub(key, 1, -#'sigs' - 1)
    table.sort(signatures)
    for _, each in ipairs(signatures) do
      values.append(seen.more, { lane .. 'eligible:' .. each, lane .. 'reclaimable:' .. each })
    end
    return table.concat(signatures, ' ')
  end
  local _, content = entries(seen, key)
  return content
end

local function note(seen, key)
  if seen.done[key] then return end
  seen.done[key] = true
  seen.room.left = math.max(0, seen.room.left - READ)
  local ok, content = try(content_of, seen, key)
  if content == '' then return end
  local name = string.sub(key, #seen.prefix + 1)
  seen.present[#seen.present + 1] = name
  seen.lines[#seen.lines + 1] = name .. '=' .. (ok and content or 'unreadable ' .. content)
end

-- Notes the executions and, while they are few, how many have a record.
local function note_executions(seen, tag)
  local ok, ids, content = try(entries, seen, seen.prefix .. 'all_executions')
  seen.lines[1] = ok and content or 'unreadable ' .. ids
  if not ok or not ids then return end
  local count, names = 0, {}
  for i, id in ipairs(ids) do names[i] = K.core(tag, id) end
  for first, last in values.pieces(names) do
    count = count + server.call('EXISTS', unpack(names, first, last))
  end
  seen.lines[2] = values.text(count)
end

local function possible_keys(prefix, place)
  local keys, known, others = {}, {}, {}
  for _, name in ipairs(place.known) do known[prefix .. name] = true end
  for _, name in ipairs(place.whole and indexes.TIMERS or {}) do keys[#keys + 1] = prefix .. name end
  for _, lane in ipairs(place.lanes) do
    indexes.add_lane(keys, place.tag, lane)
    keys[#keys + 1] = prefix .. 'lane:' .. K.lane_part(lane) .. ':config'
  end
  for _, key in ipairs(keys) do
    if not known[key] then others[#others + 1] = key end
  end
  return others
end

local function survey(place, exists, room)
  local tag, prefix = place.tag, K.index(place.tag, '')
  local seen = { prefix = prefix, done = {}, present = {}, lines = {}, more = {}, room = room }
  if place.whole then note_executions(seen, tag) end
  for _, name in ipairs(place.known) do note(seen, prefix .. name) end
  for _, key in ipairs(place.keys) do
    if exists[key] then note(seen, key) end
  end
  for _, key in ipairs(indexes.existing(seen.more)) do note(seen, key) end
  if seen.large then
    -- Counts alone miss changes that the event feed shows.
    local ok, last = try(server.call, 'XREVRANGE', K.events(tag), '+', '-', 'COUNT', 1)
    seen.lines[#seen.lines + 1] = ok and last[1] and last[1][1] or ''
  end
  table.sort(seen.lines)
  return { tag, server.sha1hex(table.concat(seen.lines, '\n')), seen.present }
end

register('ff_survey', function(_, args)
  local places, keys, exists, surveys, room = {}, {}, {}, {}, { left = AT_ONCE }
  local at = 1
  while at <= #args do
    local lanes_end = at + 2 + tonumber(args[at + 2])
    local known_end = lanes_end + 1 + tonumber(args[lanes_end + 1])
    local place = { tag = args[at], whole = args[at + 1] == '1',
      lanes = values.slice(args, at + 3, lanes_end),
      known = values.slice(args, lanes_end + 2, known_end) }
    place.keys = possible_keys(K.index(place.tag, ''), place)
    values.append(keys, place.keys)
    places[#places + 1], at = place, known_end + 1
  end
  for _, key in ipairs(indexes.existing(keys)) do exists[key] = true end
  for i, place in ipairs(places) do
    if i > 1 and room.left < AT_ONCE / 2 then break end
    surveys[i] = survey(place, exists, room)
  end
  return reply.ok(surveys)
end, { 'no-writes' })
