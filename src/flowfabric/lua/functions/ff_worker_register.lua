-- ff_worker_register: register a worker process, or refresh its registration.
-- Keys (tag = namespace): worker alive, worker caps, workers, drains, worker events.
-- Arguments: worker_id, instance, lanes CSV, capabilities CSV, ttl ms, only_if_absent (0 | 1), start id,
--   tasks CSV, namespaces that it serves (separated by spaces; empty: its own).
--   The start id tells a repeated registration from that of another process.
-- Replies: registered | refreshed, the namespaces in which an earlier process of this name was being
--   drained or empty. Errors: invalid_input. Events: worker_registered.
register('ff_worker_register', function(keys, args)
  local tag, now = keys[1], clock.now()
  local worker_id, instance, ttl = args[1], args[2], tonumber(args[5])
  local alive, rec = K.worker_alive(tag, instance), K.worker_record(tag, instance)
  local known = server.call('HMGET', rec, 'worker_id', 'start_id', 'undrained')
  if known[1] and known[1] ~= worker_id then
    return reply.err('invalid_input', 'worker_instance_id: instance_id reassigned: it belongs to ' .. known[1])
  end
  local was_alive = server.call('EXISTS', alive) == 1
  if was_alive and args[6] == '1' and known[2] ~= args[7] then
    return reply.err('invalid_input', 'worker_instance_id: instance_id in use')
  end
  local drain = was_alive and server.call('HGET', K.drains(tag), instance)
  -- A repeat of this process answers the same.
  local undrained = not was_alive and workers.undrain(tag, instance)
    or not drain and known[2] == args[7] and known[3]
  server.call('SET', alive, now, 'PX', ttl)
  local fields = { 'worker_id', worker_id, 'ttl_ms', ttl, 'registered_at_ms', now,
    'last_heartbeat_ms', now, 'start_id', args[7] }
  values.add(fields, 'lanes_csv', args[3])
  values.add(fields, 'caps_csv', args[4])
  values.add(fields, 'tasks_csv', args[8])
  values.add(fields, 'namespaces', args[9])
  values.add(fields, 'undrained', undrained)
  server.call('DEL', rec)
  server.call('HSET', rec, unpack(fields))
  server.call('PEXPIRE', rec, ttl)
  server.call('HSET', K.workers(tag), instance, worker_id)
  -- A process that is being drained and serves other namespaces now gets nothing of those either.
  if drain then workers.drain(tag, instance, string.match(drain, '^%S+')) end
  if was_alive then return reply.ok('refreshed', undrained or '') end
  workers.event(tag, now, 'worker_registered', worker_id, instance)
  return reply.ok('registered', undrained or '')
end, { 'allow-oom' })
