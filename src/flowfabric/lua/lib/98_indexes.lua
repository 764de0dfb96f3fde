-- Which indexes a partition may have, and which exist.

-- Indexes of a partition that hold execution ids by time.
indexes.TIMERS = { 'lease_expiry', 'attempt_timeout', 'execution_deadline', 'suspension_timeout' }

-- Indexes of a lane that hold execution ids; claimable ones are also indexed by signature.
indexes.OF_LANE = {
  'eligible', 'delayed', 'active', 'reclaimable', 'suspended', 'terminal', 'blocked:dependencies',
  'blocked:budget', 'blocked:quota', 'blocked:route', 'blocked:operator', 'blocked:lane',
}

local function find(names, first, last, found)
  local count = server.call('EXISTS', unpack(names, first, last))
  if count == 0 then return end
  if count == last - first + 1 then
    for i = first, last do found[#found + 1] = names[i] end
    return
  end
  local middle = math.floor((first + last) / 2)
  find(names, first, middle, found)
  find(names, middle + 1, last, found)
end

function indexes.existing(names)
  local found = {}
  for first, last in values.pieces(names) do find(names, first, last, found) end
  return found
end

-- The prefix of a lane's keys. Not cached: the names of every lane and partition would displace
-- others.
function indexes.of_lane(tag, lane) return K.index(tag, '') .. 'lane:' .. K.lane_part(lane) .. ':' end

function indexes.add_lane(names, tag, lane)
  local part = indexes.of_lane(tag, lane)
  for _, suffix in ipairs(indexes.OF_LANE) do names[#names + 1] = part .. suffix end
  names[#names + 1] = part .. 'sigs'
end

-- How many indexes or records one call reads: about a millisecond.
local AT_ONCE = 500

-- The results of `read(tag, lane)` for the lanes of partitions (tag, number of lanes, lanes), until
-- the limit of a call; `read` also returns the cost of a lane.
function indexes.of_places(args, read)
  local found, left, at = {}, AT_ONCE, 1
  while at <= #args do
    local last = at + 1 + tonumber(args[at + 1])
    for i = at + 2, last do
      if left <= 0 then return found end
      local row, cost = read(args[at], args[i])
      found[#found + 1], left = row, left - cost
    end
    at = last + 1
  end
  return found
end
