-- ff_store_lane: store settings of a lane for the whole deployment, and register the lane.
-- Keys (tag = that of the lane registry): lanes, places, placements, lane config.
-- Arguments: lane, maximum number of lanes, number of partitions, request id (a repeated request gets
--   the same answer and has no second effect), then any number of settings: name, value; an empty value
--   removes one.
-- Replies: the state before, then what each partition copies: version, shards, settings as name, value.
-- Errors: lane_limit_exceeded. Events: none.
register('ff_store_lane', function(keys, args)
  local tag, lane = keys[1], args[1]
  if server.call('SISMEMBER', K.LANES, lane) == 0
      and server.call('SCARD', K.LANES) >= tonumber(args[2]) then
    return reply.err('lane_limit_exceeded', lane .. ': ' .. args[2] .. ' lanes are in use')
  end
  server.call('SADD', K.LANES, lane)
  server.call('HSET', K.index(tag, 'places'), '* ' .. lane, 'kept')
  local before, config = lanes.store(tag, lane, args[3], args[4], args, 5)
  return reply.ok(before, lanes.copied(config))
end, { 'allow-oom' })
