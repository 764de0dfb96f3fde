-- ff_release_unknown: the lease holder does not know the task; the attempt waits for a worker that does.
-- Keys: core, lane active / eligible, sigs, lease_expiry, worker leases, attempt_timeout.
-- Arguments: execution_id, fence, source, kind.
-- Replies: public_state. Errors: execution_not_found, invalid_input (another kind) and those of the
--   fence. Events: released, expired (a lapsed lease).
pausing.register_function('ff_release_unknown', 'unknown_task', function(c, id, rec, args)
  if args[4] ~= rec.execution_kind then
    reply.refuse('invalid_input', 'kind: the task of the execution is ' .. rec.execution_kind)
  end
  pausing.release(c, id, rec, S.eligible('i'), 'unknown_task:waiting',
    { offered_to = record.worker_instance(rec) })
  waiting.ring(c, rec)
  return 'waiting'
end, { 'allow-oom' })
