-- Loaded by tests only: moves the engine's clock and shows how keys are built.
server.register_function('ff_test_clock', function(_, args)
  clock.offset = tonumber(args[1])
  clock.last = 0
  return reply.ok(clock.now())
end)

server.register_function('ff_test_key', function(keys, args)
  return reply.ok(K[args[1]](keys[1], unpack(args, 2)))
end)
