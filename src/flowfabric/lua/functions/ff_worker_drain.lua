-- ff_worker_drain: note that a worker process takes no more work.
-- Keys (tag = namespace): worker alive, worker caps, drains.
-- Arguments: instance, ms until its leases are revoked.
-- Replies: draining | not_registered, the namespaces that it serves (separated by spaces).
-- Errors: none. Events: none.
register('ff_worker_drain', function(keys, args)
  local tag, instance = keys[1], args[1]
  if server.call('EXISTS', K.worker_alive(tag, instance), K.worker_record(tag, instance)) == 0 then
    return reply.ok('not_registered', '')
  end
  local ends_at = clock.after(clock.now(), tonumber(args[2]))
  return reply.ok('draining', workers.drain(tag, instance, values.text(ends_at)))
end, { 'allow-oom' })
