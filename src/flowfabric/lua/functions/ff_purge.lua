-- ff_purge: go on deleting what trimmed executions left, a bounded number of keys a call.
-- Keys: attempts, streams, waitpoints, signals, purge_backlog. Arguments: none.
-- Replies: executions worked on, executions left. Errors: none. Events: none.
register('ff_purge', function(keys)
  local c = Context.open(keys[1])
  local backlog = K.index(c.tag, 'purge_backlog')
  local found = server.call('HRANDFIELD', backlog, 1, 'WITHVALUES')
  if not found[1] then return reply.ok(0, 0) end
  local id, todo = found[1], found[2]
  -- An unreadable note must not hold up the others: what the listings tell is deleted.
  local left = purging.step(c, id, string.find(todo, '^%d+s?$') and todo or '0s')
  if left then
    server.call('HSET', backlog, id, left)
  else
    server.call('HDEL', backlog, id)
  end
  return reply.ok(1, server.call('HLEN', backlog))
end, { 'allow-oom' })
