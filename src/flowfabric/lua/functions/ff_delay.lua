-- ff_delay: the lease holder gives the execution back until a time; at or before now, at once.
-- Keys: core, lane active / delayed / eligible, lease_expiry, worker leases, attempt_timeout.
-- Arguments: execution_id, fence, source (an override: `operator_override <request id>`),
--   delay_until.
-- Replies: public_state. Errors: execution_not_found and those of the fence.
-- Events: released, expired (a lapsed lease).
reply.register_function('ff_delay', function(keys, args)
  local c = Context.open(keys[1])
  local id, text, source, until_ms = args[1], args[2], args[3], tonumber(args[4])
  local rec = record.checked_lease(c, id)
  if not rec then return reply.err('execution_not_found') end
  local request = operator.request(source)
  local answer = request and operator.answered(rec, request)
  if answer then return reply.ok(answer) end
  local problem = fence.check(c, id, rec, text, request, true)
  if problem then
    local before = pausing.replayed(c, id, rec, text, 'worker_delay')
    return before and reply.ok(before) or problem
  end
  if until_ms > c.now then
    answer = 'delayed'
    pausing.release(c, id, rec, S.delayed('d', 'i'), 'worker_delay:delayed', { delay_until = until_ms })
  else
    answer = 'waiting'
    pausing.release(c, id, rec, S.eligible('i'), 'worker_delay:waiting', {})
    c:ring(rec.lane_id)
  end
  if request then operator.remember(c, id, rec, request, answer) end
  return reply.ok(answer)
end, { 'allow-oom' })
