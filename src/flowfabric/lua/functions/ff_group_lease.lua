-- ff_group_lease: give a feed to a member of a group, and store what the group has processed.
-- Keys: group position.
-- Arguments: group, member, lease ms (0 returns the feed), processed ms, processed seq (both empty
--   to store none). A position never moves back, whoever reports it.
-- Replies: 1 if the member has the feed now, else 0; the stored position, or empty.
-- Errors: none. Events: none.
register('ff_group_lease', function(keys, args)
  local key, member, lease, now = K.group(keys[1], args[1]), args[2], tonumber(args[3]), clock.now()
  local ms, seq = tonumber(args[4]), tonumber(args[5])
  local stored = server.call('HMGET', key, 'position', 'member', 'until')
  local position, holder = stored[1], stored[2]
  if ms then
    local old_ms, old_seq = string.match(position or '0-0', '^(%d+)-(%d+)$')
    old_ms, old_seq = tonumber(old_ms), tonumber(old_seq)
    if ms > old_ms or (ms == old_ms and seq > old_seq) then
      position = args[4] .. '-' .. args[5]
      server.call('HSET', key, 'position', position)
    end
  end
  local free = not holder or holder == member or tonumber(stored[3]) <= now
  if free and lease == 0 then server.call('HDEL', key, 'member', 'until') end
  if free and lease > 0 then server.call('HSET', key, 'member', member, 'until', now + lease) end
  return reply.ok(free and lease > 0 and 1 or 0, position or '')
end, { 'allow-oom' })
