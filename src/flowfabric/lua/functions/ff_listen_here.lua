-- ff_listen_here: have an idle process hear the next ring on this primary; in a cluster only.
-- Keys: none. Arguments: listener, how long it listens in ms, what it offers as for a claim, then its lanes.
-- Replies: nothing | bell, tag (a ring that waited: the process then does not listen). Errors: none.
-- Events: none.
register('ff_listen_here', function(keys, args)
  local now, lanes = clock.now(), values.slice(args, 4, #args)
  return reply.ok(listeners.register(keys[1], now, args[1], tonumber(args[2]), args[3], lanes))
end, { 'allow-oom' })
