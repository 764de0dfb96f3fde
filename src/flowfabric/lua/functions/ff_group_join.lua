-- ff_group_join: enter a subscription group, stay in it, or leave it.
-- Keys: group members, group start. Arguments: group, member, lease ms (0 leaves), start cursor.
--   The start counts for the first member that ever joins.
-- Replies: the group's start cursor, its live members in order. Errors: none. Events: none.
register('ff_group_join', function(keys, args)
  local members, start, now = K.group_members(keys[1], args[1]), K.group_start(keys[1], args[1]), clock.now()
  local lease = tonumber(args[3])
  server.call('ZREMRANGEBYSCORE', members, '-inf', now)
  if lease == 0 then
    server.call('ZREM', members, args[2])
  else
    server.call('ZADD', members, now + lease, args[2])
    server.call('SET', start, args[4], 'NX')
  end
  local found = server.call('ZRANGE', members, 0, -1)
  table.sort(found)
  return reply.ok(server.call('GET', start) or args[4], found)
end, { 'allow-oom' })
