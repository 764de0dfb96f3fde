-- ff_delay: the lease holder releases the execution until a time; at or before now, at once.
-- Keys: core, lane active / delayed / eligible, lease_expiry, worker leases, attempt_timeout.
-- Arguments: execution_id, fence, source (an override: `operator_override <request id>`),
--   delay_until.
-- Replies: public_state. Errors: execution_not_found and those of the fence.
-- Events: released, expired (a lapsed lease).
pausing.register_function('ff_delay', 'worker_delay', function(c, id, rec, args)
  local until_ms = tonumber(args[4])
  if until_ms > c.now then
    pausing.release(c, id, rec, S.delayed('d', 'i'), 'worker_delay:delayed', { delay_until = until_ms })
    return 'delayed'
  end
  pausing.release(c, id, rec, S.eligible('i'), 'worker_delay:waiting', {})
  waiting.ring(c, rec)
  return 'waiting'
end, { 'allow-oom' })
