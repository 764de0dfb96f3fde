-- ff_worker_register: register a worker process, or refresh its registration.
-- Keys (tag = namespace): worker alive, worker caps, workers, worker events.
-- Arguments: worker_id, instance, lanes CSV, capabilities CSV, ttl ms, only_if_absent (0 | 1), nonce,
--   tasks CSV.
--   The nonce tells a repeated registration from that of another process.
-- Replies: registered | refreshed. Errors: invalid_input. Events: worker_registered.
register('ff_worker_register', function(keys, args)
  local tag, now = keys[1], clock.now()
  local worker_id, instance, ttl = args[1], args[2], tonumber(args[5])
  local alive, rec = K.worker_alive(tag, instance), K.worker_record(tag, instance)
  local known = server.call('HMGET', rec, 'worker_id', 'nonce')
  if known[1] and known[1] ~= worker_id then
    return reply.err('invalid_input', 'worker_instance_id: instance_id reassigned: it belongs to ' .. known[1])
  end
  local was_alive = server.call('EXISTS', alive) == 1
  if was_alive and args[6] == '1' and known[2] ~= args[7] then
    return reply.err('invalid_input', 'worker_instance_id: instance_id in use')
  end
  server.call('SET', alive, now, 'PX', ttl)
  local fields = { 'worker_id', worker_id, 'ttl_ms', ttl, 'registered_at_ms', now,
    'last_heartbeat_ms', now, 'nonce', args[7] }
  values.add(fields, 'lanes_csv', args[3])
  values.add(fields, 'caps_csv', args[4])
  values.add(fields, 'tasks_csv', args[8])
  server.call('DEL', rec)
  server.call('HSET', rec, unpack(fields))
  server.call('PEXPIRE', rec, ttl)
  server.call('SADD', K.workers(tag), instance)
  if was_alive then return reply.ok('refreshed') end
  workers.event(tag, now, 'worker_registered', worker_id, instance)
  return reply.ok('registered')
end, { 'allow-oom' })
