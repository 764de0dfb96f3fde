-- ff_register_places: note, with the time, that lanes are used in partitions.
-- Keys (tag = that of the lane registry): lanes, places, placements.
-- Arguments: maximum number of lanes, then per place: partition number, lane. `*` instead of a
--   number registers a lane that stays when it is empty.
-- Replies: new lanes refused because the registry is full, the time, the lanes that are or were not
--   pinned to one partition with their placement. Errors: none. Events: none.
register('ff_register_places', function(keys, args)
  local places, now = K.index(keys[1], 'places'), values.text(clock.now())
  local room = tonumber(args[1]) - server.call('SCARD', K.LANES)
  local refused = {}
  for i = 2, #args, 2 do
    local number, lane = args[i], args[i + 1]
    if room <= 0 and server.call('SISMEMBER', K.LANES, lane) == 0 then
      refused[#refused + 1] = lane
    else
      room = room - server.call('SADD', K.LANES, lane)
      local whole = '* ' .. lane
      if number == '*' then
        server.call('HSET', places, whole, 'kept')
      elseif server.call('HGET', places, whole) == 'kept' then
        server.call('HSET', places, number .. ' ' .. lane, now)
      else
        server.call('HSET', places, number .. ' ' .. lane, now, whole, now)
      end
    end
  end
  return reply.ok(refused, clock.now(), lanes.placements(keys[1], args))
end, { 'allow-oom' })
