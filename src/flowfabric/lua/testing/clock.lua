-- Moves or stops the engine's clock. Only `flowfabric.testing` adds this file to the library, and
-- a process without it refuses a server that has it.
local running = clock.now

register('ff_test_clock', function(_, args)
  clock.offset = tonumber(args[1])
  clock.last = 0
  clock.now = running
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
