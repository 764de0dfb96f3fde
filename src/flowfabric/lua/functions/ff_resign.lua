-- ff_resign: give up the lease of the process that runs scanners, if it is the caller's.
-- Keys (tag = {scanners}): leader. Arguments: duty, identity of the process.
-- Replies: nothing. Errors: none. Events: none.
register('ff_resign', function(keys, args)
  local lease = K.leader(keys[1], args[1])
  if server.call('GET', lease) == args[2] then server.call('DEL', lease) end
  return reply.ok()
end, { 'allow-oom' })
