-- ff_purge: delete more of what trimmed executions left, a limited number of keys per call.
-- Keys: attempts, streams, waitpoints, signals, purge_backlog. Arguments: none.
-- Replies: executions handled, executions left. Errors: none. Events: none.
register('ff_purge', function(keys)
  local c = Context.open(keys[1])
  local backlog = K.index(c.tag, 'purge_backlog')
  local found = server.call('HRANDFIELD', backlog, 1, 'WITHVALUES')
  if not found[1] then return reply.ok(0, 0) end
  local id, todo = found[1], found[2]
  -- An unreadable number of attempts must not block the others: the listed keys are deleted.
  local left = purging.step(c, id, string.find(todo, '^%d+s?$') and todo or '0s')
  if left then
    server.call('HSET', backlog, id, left)
  else
    server.call('HDEL', backlog, id)
  end
  return reply.ok(1, server.call('HLEN', backlog))
end, { 'allow-oom' })
