-- ff_worker_heartbeat: a registered worker is alive; renews its registration.
-- Keys (tag = namespace): worker alive, worker caps, drains. Arguments: instance.
-- Replies: `refreshed`, next expiry ms, 1 if it is being drained | `not_registered`. Errors: none.
-- Events: none.
register('ff_worker_heartbeat', function(keys, args)
  local tag, now = keys[1], clock.now()
  local alive, rec = K.worker_alive(tag, args[1]), K.worker_record(tag, args[1])
  local ttl = tonumber(server.call('HGET', rec, 'ttl_ms') or 0)
  if ttl <= 0 or server.call('EXISTS', alive) == 0 then return reply.ok('not_registered') end
  server.call('SET', alive, now, 'PX', ttl)
  server.call('HSET', rec, 'last_heartbeat_ms', now)
  server.call('PEXPIRE', rec, ttl)
  return reply.ok('refreshed', now + ttl, server.call('HEXISTS', K.drains(tag), args[1]))
end, { 'allow-oom' })
