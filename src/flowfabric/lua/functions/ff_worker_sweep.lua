-- ff_worker_sweep: remove worker processes whose registration has expired from the index.
-- Keys (tag = namespace): workers, worker alive, worker caps, drains, worker events.
-- Arguments: cursor (0 at first), number to look at.
-- Replies: next cursor (0 at the end), number removed, a list of those of them that were being drained:
--   instance, the namespaces in which it was (separated by spaces). Errors: none. Events: worker_expired.
register('ff_worker_sweep', function(keys, args)
  local tag, swept, undrained = keys[1], 0, {}
  local page = server.call('HSCAN', K.workers(tag), args[1], 'COUNT', args[2])
  for i = 1, #page[2], 2 do
    local instance = page[2][i]
    if server.call('EXISTS', K.worker_alive(tag, instance), K.worker_record(tag, instance)) == 0 then
      local worker_id, drained = workers.forget(tag, instance)
      if drained then values.append(undrained, { instance, drained }) end
      workers.event(tag, clock.now(), 'worker_expired', worker_id, instance)
      swept = swept + 1
    end
  end
  return reply.ok(page[1], swept, undrained)
end, { 'allow-oom' })
