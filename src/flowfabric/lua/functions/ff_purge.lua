-- ff_purge: go on deleting the attempts of trimmed executions, a bounded number a call.
-- Keys: attempts, purge_backlog. Arguments: none.
-- Replies: keys deleted, executions left. Errors: none. Events: none.
local CHUNK = 500

server.register_function('ff_purge', function(keys)
  local c = Context.open(keys[1])
  local backlog = K.index(c.tag, 'purge_backlog')
  local page = server.call('HSCAN', backlog, 0, 'COUNT', 1)[2]
  if not page[1] then return reply.ok(0, 0) end
  local id, left = page[1], tonumber(page[2])
  local doomed = {}
  for i = left - 1, math.max(0, left - CHUNK), -1 do doomed[#doomed + 1] = K.attempt(c.tag, id, i) end
  if #doomed > 0 then server.call('DEL', unpack(doomed)) end
  if left <= CHUNK then
    server.call('HDEL', backlog, id)
  else
    server.call('HSET', backlog, id, left - CHUNK)
  end
  return reply.ok(#doomed, server.call('HLEN', backlog))
end)
