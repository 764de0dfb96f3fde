-- Moves or stops the engine's clock. Only `flowfabric.testing` adds this file to the library, and
-- a process without it refuses a server that has it.
local running = clock.now

-- Moves the end of every lease that a worker holds.
local function keep_leases(tag, instance, ms)
  local c = Context.open(tag)
  for _, id in ipairs(server.call('SMEMBERS', K.worker_leases(tag, instance))) do
    local rec = record.read(c, id)
    if rec and rec.state == S.ACTIVE then
      local expires = rec.lease_expires_at + ms
      server.call('HSET', K.core(tag, id), 'lease_expires_at', expires)
      c:zadd(K.index(tag, 'lease_expiry'), expires, id)
      c:zadd(K.lane(tag, rec.lane_id, 'active'), expires, id)
    end
  end
end

-- Sets the offset from the server's time. In the same step, the leases of these workers last as
-- much longer: a worker that lives would have renewed them meanwhile.
-- Arguments: offset ms, number of partitions, worker_instance_id...
register('ff_test_clock', function(_, args)
  local ms = args[1] - clock.offset
  clock.offset = tonumber(args[1])
  clock.last = 0
  clock.now = running
  for i = 3, #args do
    for partition = 0, args[2] - 1 do keep_leases('{fp:' .. partition .. '}', args[i], ms) end
  end
  return reply.ok(clock.now())
end, { 'allow-oom' })

-- Stops the clock, so that a test can act exactly at a deadline.
register('ff_test_freeze', function(_, args)
  local at = tonumber(args[1])
  clock.shifted = true
  clock.now = function()
    clock.shifted = true
    return at
  end
  return reply.ok(at)
end, {})
