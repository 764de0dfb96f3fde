-- ff_worker_dead: remove a worker process from the registry; its leases are untouched.
-- Keys (tag = namespace): worker alive, worker caps, workers, drains, worker events.
-- Arguments: instance, reason.
-- Replies: marked | not_registered, the namespaces that it served, those in which it was being
--   drained or empty (both separated by spaces). Errors: none. Events: worker_dead.
register('ff_worker_dead', function(keys, args)
  local tag, instance = keys[1], args[1]
  local known = server.call('EXISTS', K.worker_alive(tag, instance), K.worker_record(tag, instance))
  local served = workers.served(tag, instance)
  local worker_id, drained = workers.forget(tag, instance)
  if known == 0 then return reply.ok('not_registered', served, drained or '') end
  workers.event(tag, clock.now(), 'worker_dead', worker_id, instance, args[2])
  return reply.ok('marked', served, drained or '')
end, { 'allow-oom' })
