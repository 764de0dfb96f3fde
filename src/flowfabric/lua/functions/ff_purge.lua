-- ff_purge: go on deleting what trimmed executions left, a bounded number of keys a call.
-- Keys: attempts, streams, waitpoints, signals, purge_backlog. Arguments: none.
-- Replies: executions worked on, executions left. Errors: none. Events: none.
register('ff_purge', function(keys)
  local c = Context.open(keys[1])
  local backlog = K.index(c.tag, 'purge_backlog')
  local page = server.call('HSCAN', backlog, 0, 'COUNT', 1)[2]
  if not page[1] then return reply.ok(0, 0) end
  local left = purging.step(c, page[1], page[2])
  if left then
    server.call('HSET', backlog, page[1], left)
  else
    server.call('HDEL', backlog, page[1])
  end
  return reply.ok(1, server.call('HLEN', backlog))
end)
