-- ff_survey: what the indexes of partitions look like, so that unchanged records need not be read
-- again. On a single server one call may name many partitions; in a cluster each gets its own.
-- Keys: every index, core. Arguments: number of lanes, then the lanes, then per partition: tag, number of
--   indexes that existed before, their names (after `ff:idx:T:`).
-- Replies: per partition [tag, fingerprint, number of executions, names of the indexes that exist].
--   The fingerprint tells whatever is added to an index, lost from it or scored anew; of an index
--   with very many entries only how many there are. Renewals of leases do not change it.
-- Errors: none.

-- The largest index whose entries are looked at.
local SMALL = 500

local function is_lease_index(name)
  return name == 'lease_expiry' or string.find(name, ':active$') ~= nil
end

-- The ids of an index and a text that tells its content; no ids where there are too many.
local function entries(key, name)
  local flat = server.call('ZRANGE', key, 0, SMALL, 'WITHSCORES')
  if #flat > 2 * SMALL then return nil, 'many ' .. server.call('ZCARD', key) end
  local ids = {}
  for i = 1, #flat, 2 do ids[#ids + 1] = flat[i] end
  if not is_lease_index(name) then return ids, table.concat(flat, ' ') end
  table.sort(ids)
  return ids, table.concat(ids, ' ')
end

local function sorted_set(key)
  local members = server.call('SMEMBERS', key)
  table.sort(members)
  return members
end

-- What one index holds, as text; it is nil when the index does not exist.
local function told(seen, name)
  local key = seen.prefix .. name
  if string.find(name, ':config$') then
    return server.call('HGET', key, 'priority_weight_ms') or 'default'
  elseif string.find(name, ':sigs$') then
    local signatures = sorted_set(key)
    for _, signature in ipairs(signatures) do
      local lane = string.sub(name, 1, -#'sigs' - 1)
      seen.more[#seen.more + 1] = lane .. 'eligible:' .. signature
      seen.more[#seen.more + 1] = lane .. 'reclaimable:' .. signature
    end
    return #signatures > 0 and table.concat(signatures, ' ') or nil
  end
  local ids, content = entries(key, name)
  if not ids then seen.large = true end
  return content ~= '' and content or nil
end

local function note(seen, name)
  if seen.done[name] then return end
  seen.done[name] = true
  local ok, content = try(told, seen, name)
  if not ok then content = 'unreadable ' .. content end
  if not content then return end
  seen.present[#seen.present + 1] = name
  seen.lines[#seen.lines + 1] = name .. '=' .. content
end

-- How many executions there are; and, while they are few, how many of them have a record.
local function note_executions(seen, tag)
  local ok, ids, content = try(entries, seen.prefix .. 'all_executions', 'all_executions')
  if not ok then
    seen.lines[#seen.lines + 1] = 'unreadable ' .. ids
    return 0
  end
  seen.lines[#seen.lines + 1] = content
  if not ids then
    seen.large = true
    return tonumber(string.match(content, '%d+'))
  end
  local count, names = 0, {}
  for i, id in ipairs(ids) do names[i] = K.core(tag, id) end
  for first, last in values.pieces(names) do
    count = count + server.call('EXISTS', unpack(names, first, last))
  end
  seen.lines[#seen.lines + 1] = string.format('%d', count)
  return #ids
end

local function survey(tag, known)
  local seen = {
    prefix = K.index(tag, ''), done = {}, present = {}, lines = {}, more = {}, large = false,
  }
  local executions = note_executions(seen, tag)
  for _, name in ipairs(known) do note(seen, name) end
  for _, name in ipairs(seen.more) do note(seen, name) end
  if seen.large then
    -- Counts alone could miss a change that the feed tells of.
    local ok, last = try(server.call, 'XREVRANGE', K.events(tag), '+', '-', 'COUNT', 1)
    seen.lines[#seen.lines + 1] = ok and last[1] and last[1][1] or ''
  end
  table.sort(seen.lines)
  return { tag, server.sha1hex(table.concat(seen.lines, '\n')), executions, seen.present }
end

-- The keys that may exist in a partition, without those known to, and whose each is.
local function add_candidates(names, owners, tag, lanes, known)
  local all, prefix = {}, K.index(tag, '')
  for _, timer in ipairs(indexes.TIMERS) do all[#all + 1] = prefix .. timer end
  for _, lane in ipairs(lanes) do
    indexes.add_lane(all, tag, lane)
    all[#all + 1] = prefix .. 'lane:' .. K.lane_part(lane) .. ':config'
  end
  local expected = {}
  for _, name in ipairs(known) do expected[prefix .. name] = true end
  for _, name in ipairs(all) do
    if not expected[name] then
      names[#names + 1] = name
      owners[name] = tag
    end
  end
end

register('ff_survey', function(_, args)
  local lanes, places, names, owners, at = {}, {}, {}, {}, 2 + tonumber(args[1])
  for i = 2, at - 1 do lanes[#lanes + 1] = args[i] end
  while at <= #args do
    local tag, known, last = args[at], {}, at + 1 + tonumber(args[at + 1])
    for i = at + 2, last do known[#known + 1] = args[i] end
    places[#places + 1] = { tag = tag, known = known }
    places[tag] = known
    add_candidates(names, owners, tag, lanes, known)
    at = last + 1
  end
  for _, key in ipairs(indexes.existing(names)) do
    local tag = owners[key]
    table.insert(places[tag], string.sub(key, #K.index(tag, '') + 1))
  end
  local surveys = {}
  for i, place in ipairs(places) do surveys[i] = survey(place.tag, place.known) end
  return reply.ok(surveys)
end, { 'no-writes' })
