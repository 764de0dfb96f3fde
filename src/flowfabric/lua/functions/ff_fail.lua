-- ff_fail: the lease holder ends the attempt unsuccessfully; the stored policy decides on a retry.
-- Keys: core, policy, attempt, lane active / delayed / terminal, lease_expiry, worker leases, timers.
-- Arguments: execution_id, fence, source (an override: `operator_override <request id>`),
--   reason, category, retry policy JSON (operator only).
-- Replies: `retry_scheduled`, delay_until, next index | `terminal_failed`.
-- Errors: execution_not_found and those of the fence. Events: released, completion,
--   expired (a lapsed lease).
record.register_function('ff_fail', record.checked_lease, function(c, id, rec, args)
  local text, reason, category = args[2], args[4], args[5]
  local request, answer = operator.override(rec, args[3])
  if answer then return reply.ok(string.match(answer, '^(%S+) ?(%d*) ?(%d*)$')) end
  local problem = fence.check(c, id, rec, text, request, true)
  if problem then
    local own = fence.own_attempt(c, id, rec, text)
    if own and own.state == 'ended_failure' and own.ended_by == 'fail' then
      if own.delay_until then
        return reply.ok('retry_scheduled', own.delay_until, own.next_attempt_index)
      end
      return reply.ok('terminal_failed')
    end
    return problem
  end
  local policy = retry.policy(c, id)
  if request and args[6] ~= '' then policy = cjson.decode(args[6]) end
  if retry.allowed(c, rec, policy, category) then
    local due, next_index = retry.schedule(c, id, rec, policy,
      { reason = reason, category = category, ended_by = 'fail' })
    local at, next_text = values.text(due), values.text(next_index)
    operator.remember(c, id, rec, request, 'retry_scheduled ' .. at .. ' ' .. next_text)
    return reply.ok('retry_scheduled', at, next_text)
  end
  local fields = { 'ended_by', 'fail' }
  record.add_or_clear(c, id, rec, fields, 'failure_reason', reason)
  record.add_or_clear(c, id, rec, fields, 'failure_category', category)
  ending.finish(c, id, rec, {
    outcome = 'f', reason = 'failed_terminal', category = category ~= '' and category or nil,
    stream_reason = 'attempt_failure', fields = fields,
    source = request and 'operator_override' or nil,
  })
  operator.remember(c, id, rec, request, 'terminal_failed')
  return reply.ok('terminal_failed', '', '', cascade.told(c))
end, { 'allow-oom' })
