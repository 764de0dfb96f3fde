-- ff_count_lanes: how many executions each lane has in each state. On a single server one call may
-- name many partitions; in a cluster each gets its own.
-- Keys: the lanes' indexes. Arguments: per partition: tag, number of lanes, lanes.
-- Replies: per lane a list: the sizes of its indexes in the order of `indexes.OF_LANE`, then per
--   signature its name and the sizes of its eligible and reclaimable index. An index that cannot be
--   read has -1. For as many lanes as fit into one call; the caller asks for the others again.
-- Errors: none.
local function size_of(key)
  local readable, size = try(server.call, 'ZCARD', key)
  return readable and size or -1
end

local function add_signatures(sizes, lane_part)
  local readable, signatures = try(server.call, 'SMEMBERS', lane_part .. 'sigs')
  if not readable then return 0 end
  for _, signature in ipairs(signatures) do
    values.append(sizes, { signature, size_of(lane_part .. 'eligible:' .. signature),
      size_of(lane_part .. 'reclaimable:' .. signature) })
  end
  return 2 * #signatures
end

local function sizes_of(tag, lane)
  local sizes, lane_part = {}, indexes.of_lane(tag, lane)
  for i, name in ipairs(indexes.OF_LANE) do sizes[i] = size_of(lane_part .. name) end
  return sizes, #sizes + 1 + add_signatures(sizes, lane_part)
end

register('ff_count_lanes', function(_, args)
  return reply.ok(indexes.of_places(args, sizes_of))
end, { 'no-writes' })
