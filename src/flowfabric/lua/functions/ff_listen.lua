-- ff_listen: have a process hear of new bells, and list those that it should know; single server only.
-- Keys: bells, listeners, wake. Arguments: listener, how long it listens in ms, then bells that it could
--   not read: a key of another type is deleted, because rings only hint at work.
-- Replies: bells. Errors: none. Events: none.
local function listen(now, listener, ms)
  server.call('ZREMRANGEBYSCORE', K.LISTENERS, '-inf', now)
  server.call('ZADD', K.LISTENERS, now + ms, listener)
  return server.call('ZRANGE', K.BELLS, 0, -1)
end

register('ff_listen', function(keys, args)
  local now, listener, ms = clock.now(), args[1], tonumber(args[2])
  if #args > 2 then Context.mend_bell(K.ear(listener)) end
  for i = 3, #args do Context.mend_bell(K.wake(keys[1], args[i])) end
  local readable, bells = try(listen, now, listener, ms)
  if not readable then
    Context.mend_bell(K.BELLS)
    Context.mend_bell(K.LISTENERS)
    bells = listen(now, listener, ms)
  end
  return reply.ok(bells)
end, { 'allow-oom' })
