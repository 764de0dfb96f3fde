-- ff_delay: the lease holder gives the execution back until a time; at or before now, at once.
-- Keys: core, lane active / delayed / eligible, lease_expiry, worker leases, attempt_timeout.
-- Arguments: execution_id, fence, source, delay_until.
-- Replies: public_state. Errors: execution_not_found and those of the fence. Events: released.
server.register_function('ff_delay', function(keys, args)
  local c = Context.open(keys[1])
  local id, text, source, until_ms = args[1], args[2], args[3], tonumber(args[4])
  local rec = record.read(c, id)
  if not rec then return reply.err('execution_not_found') end
  local problem = fence.check(c, id, rec, text, source == 'operator_override', true)
  if problem then
    local before = pausing.replayed(c, id, rec, text, 'worker_delay')
    return before and reply.ok(before) or problem
  end
  if until_ms > c.now then
    pausing.release(c, id, rec, S.delayed('d', 'i'), 'worker_delay:delayed', { delay_until = until_ms })
    return reply.ok('delayed')
  end
  pausing.release(c, id, rec, S.eligible('i'), 'worker_delay:waiting', {})
  c:ring(rec.lane_id)
  return reply.ok('waiting')
end)
