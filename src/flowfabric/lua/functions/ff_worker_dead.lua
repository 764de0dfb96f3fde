-- ff_worker_dead: remove a worker process from the registry; its leases are untouched.
-- Keys (tag = namespace): worker alive, worker caps, workers, worker events.
-- Arguments: instance, reason. Replies: marked | not_registered. Errors: none. Events: worker_dead.
register('ff_worker_dead', function(keys, args)
  local tag, instance = keys[1], args[1]
  local rec = K.worker_record(tag, instance)
  local worker_id = server.call('HGET', rec, 'worker_id')
  local removed = server.call('DEL', K.worker_alive(tag, instance), rec)
  server.call('SREM', K.workers(tag), instance)
  if removed == 0 then return reply.ok('not_registered') end
  workers.event(tag, clock.now(), 'worker_dead', worker_id or '', instance, args[2])
  return reply.ok('marked')
end, { 'allow-oom' })
