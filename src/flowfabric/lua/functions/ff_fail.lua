-- ff_fail: the lease holder ends the attempt unsuccessfully; the stored policy decides on a retry.
-- Keys: core, policy, attempt, lane active / delayed / terminal, lease_expiry, worker leases, timers.
-- Arguments: execution_id, fence, source (an override: `operator_override <request id>`),
--   reason, category, retry policy JSON (operator only).
-- Replies: `retry_scheduled`, delay_until, next index | `terminal_failed`.
-- Errors: execution_not_found and those of the fence. Events: released, completion,
--   expired (a lapsed lease).
record.register_function('ff_fail', record.checked_lease, function(c, id, rec, args)
  local request, answer = operator.override(rec, args[3])
  if answer then return reply.ok(string.match(answer, '^(%S+) ?(%d*) ?(%d*)$')) end
  local problem, did, due, next_index =
    retry.fail(c, id, rec, args[2], args[4], args[5], request, args[6])
  if problem then return problem end
  return reply.ok(did, due or '', next_index or '', cascade.told(c))
end, { 'allow-oom' })
