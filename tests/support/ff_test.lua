-- Functions for tests: they show how keys and states are built.
register('ff_test_key', function(keys, args)
  return reply.ok(K[args[1]](keys[1], unpack(args, 2)))
end, {})

register('ff_test_state', function(_, args)
  local member = S[args[1]]
  if type(member) == 'function' then member = member(unpack(args, 2)) end
  return reply.ok(member)
end, {})

-- Writes to one index as a call for many executions does: `zadd score member`, `zrem member`, …
register('ff_test_joined', function(keys, args)
  local c = Context.open(keys[1], true)
  for _, write in ipairs(args) do
    local words = {}
    for word in string.gmatch(write, '%S+') do words[#words + 1] = word end
    c[words[1]](c, K.index(c.tag, 'joined'), unpack(words, 2))
  end
  c:flush()
  return reply.ok()
end)

-- How much one call may do for members that depend on others.
register('ff_test_units', function(_, args)
  SETTINGS.cascade_units = tonumber(args[1])
  return reply.ok()
end, { 'allow-oom' })
