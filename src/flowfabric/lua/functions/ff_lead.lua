-- ff_lead: take or renew the lease of the process that runs scanners.
-- Keys (tag = {scanners}): leader, duties. Arguments: duty (empty: all scanners), identity of the
--   process, ttl ms, ms for which a duty stays listed.
-- Replies: 1 if the process has the lease, otherwise 0. Errors: none. Events: none.
register('ff_lead', function(keys, args)
  local tag, duty, identity = keys[1], args[1], args[2]
  local lease = K.leader(tag, duty)
  local owner = server.call('GET', lease)
  if owner and owner ~= identity then return reply.ok(0) end
  server.call('SET', lease, identity, 'PX', args[3])
  if duty ~= '' then
    server.call('SADD', K.leaders(tag), duty)
    server.call('PEXPIRE', K.leaders(tag), args[4])
  end
  return reply.ok(1)
end, { 'allow-oom' })
