-- ff_survey: fingerprints of the indexes of partitions, so that unchanged records need not be read
-- again. On a single server one call may name many partitions; in a cluster each gets its own.
-- Keys: every index, core. Arguments: per partition: tag, whether to look at its own indexes
--   (1 | 0), number of lanes, lanes, number of indexes that existed before, their names (after
--   `ff:idx:T:`).
-- Replies: per partition [tag, fingerprint, names of the indexes that exist], for as many
--   partitions as fit into one call; the caller asks for the others again.
--   The fingerprint changes with every entry added, removed or scored anew; for an index with very
--   many entries, only with their number. Lease renewals do not change it.
-- Errors: none.

-- The largest index whose entries are read, and the number of entries that one call reads.
local SMALL, AT_ONCE = 500, 5000
-- Opening an index costs as much as reading this many entries.
local READ = 10

local function is_lease_index(name)
  return name == 'lease_expiry' or string.find(name, ':active$') ~= nil
end

-- The ids of an index, or nil if there are too many, and its content as text.
local function entries(seen, key, name)
  local most = math.min(SMALL, seen.room.left)
  local flat = server.call('ZRANGE', key, 0, most, 'WITHSCORES')
  if #flat > 2 * most then return nil, 'many ' .. server.call('ZCARD', key) end
  seen.room.left = math.max(0, seen.room.left - #flat / 2)
  local ids = {}
  for i = 1, #flat, 2 do ids[#ids + 1] = flat[i] end
  if not is_lease_index(name) then return ids, table.concat(flat, ' ') end
  table.sort(ids)
  return ids, table.concat(ids, ' ')
end

local function content_of(seen, name)
  local key = seen.prefix .. name
  if string.find(name, ':config$') then
    return server.call('HGET', key, 'priority_weight_ms') or 'default'
  elseif string.find(name, ':sigs$') then
    local signatures = waiting.signatures(key)
    table.sort(signatures)
    for _, signature in ipairs(signatures) do
      local lane = string.sub(name, 1, -#'sigs' - 1)
      seen.more[#seen.more + 1] = lane .. 'eligible:' .. signature
      seen.more[#seen.more + 1] = lane .. 'reclaimable:' .. signature
    end
    return #signatures > 0 and table.concat(signatures, ' ') or nil
  end
  local ids, content = entries(seen, key, name)
  if not ids then seen.large = true end
  return content ~= '' and content or nil
end

local function note(seen, name)
  if seen.done[name] then return end
  seen.done[name] = true
  seen.room.left = math.max(0, seen.room.left - READ)
  local ok, content = try(content_of, seen, name)
  if not ok then content = 'unreadable ' .. content end
  if not content then return end
  seen.present[#seen.present + 1] = name
  seen.lines[#seen.lines + 1] = name .. '=' .. content
end

-- Notes the executions and, while they are few, how many have a record.
local function note_executions(seen, tag)
  local ok, ids, content = try(entries, seen, seen.prefix .. 'all_executions', 'all_executions')
  if not ok then
    seen.lines[#seen.lines + 1] = 'unreadable ' .. ids
    return
  end
  seen.lines[#seen.lines + 1] = content
  if not ids then
    seen.large = true
    return
  end
  local count, names = 0, {}
  for i, id in ipairs(ids) do names[i] = K.core(tag, id) end
  for first, last in values.pieces(names) do
    count = count + server.call('EXISTS', unpack(names, first, last))
  end
  seen.lines[#seen.lines + 1] = string.format('%d', count)
end

local function survey(place, room)
  local tag = place.tag
  local seen = {
    prefix = K.index(tag, ''), done = {}, present = {}, lines = {}, more = {}, large = false,
    room = room,
  }
  if place.whole then note_executions(seen, tag) end
  for _, name in ipairs(place.known) do note(seen, name) end
  for i, name in ipairs(seen.more) do seen.more[i] = seen.prefix .. name end
  for _, key in ipairs(indexes.existing(seen.more)) do note(seen, string.sub(key, #seen.prefix + 1)) end
  if seen.large then
    -- Counts alone miss changes that the event feed shows.
    local ok, last = try(server.call, 'XREVRANGE', K.events(tag), '+', '-', 'COUNT', 1)
    seen.lines[#seen.lines + 1] = ok and last[1] and last[1][1] or ''
  end
  table.sort(seen.lines)
  return { tag, server.sha1hex(table.concat(seen.lines, '\n')), seen.present }
end

-- Adds the keys that may exist in a partition, without the known ones, and their partition.
local function add_candidates(names, owners, place)
  local all, known, prefix = {}, {}, K.index(place.tag, '')
  if place.whole then
    for _, timer in ipairs(indexes.TIMERS) do all[#all + 1] = prefix .. timer end
  end
  for _, lane in ipairs(place.lanes) do
    indexes.add_lane(all, place.tag, lane)
    all[#all + 1] = prefix .. 'lane:' .. K.lane_part(lane) .. ':config'
  end
  for _, name in ipairs(place.known) do known[prefix .. name] = true end
  for _, name in ipairs(all) do
    if not known[name] then
      names[#names + 1] = name
      owners[name] = place
    end
  end
end

register('ff_survey', function(_, args)
  local places, names, owners = {}, {}, {}
  local at = 1

  local function take()
    local first, last = at + 1, at + tonumber(args[at])
    at = last + 1
    return values.slice(args, first, last)
  end

  while at <= #args do
    local place = { tag = args[at], whole = args[at + 1] == '1' }
    at = at + 2
    place.lanes, place.known = take(), take()
    add_candidates(names, owners, place)
    places[#places + 1] = place
  end
  for _, key in ipairs(indexes.existing(names)) do
    local place = owners[key]
    place.known[#place.known + 1] = string.sub(key, #K.index(place.tag, '') + 1)
  end
  local surveys, room = {}, { left = AT_ONCE }
  for i, place in ipairs(places) do
    if i > 1 and room.left < AT_ONCE / 2 then break end
    surveys[i] = survey(place, room)
  end
  return reply.ok(surveys)
end, { 'no-writes' })
