-- ff_forget_places: remove lanes that are no longer used from the registry.
-- Keys (tag = that of the lane registry): lanes, places; wake on a single server.
-- Arguments: per place: partition number, lane, the stamp seen. `*` instead of a number removes the
--   lane itself. A place with another stamp is in use and stays.
-- Replies: number removed. Errors: none. Events: none.
register('ff_forget_places', function(keys, args)
  local places, removed = K.index(keys[1], 'places'), 0
  for i = 1, #args, 3 do
    local number, lane = args[i], args[i + 1]
    local place = number .. ' ' .. lane
    if server.call('HGET', places, place) == args[i + 2] then
      server.call('HDEL', places, place)
      if number == '*' then
        server.call('SREM', K.LANES, lane)
        if not SETTINGS.cluster then server.call('DEL', K.wake(keys[1], lane)) end
      end
      removed = removed + 1
    end
  end
  return reply.ok(removed)
end, { 'allow-oom' })
