-- ff_expire: end executions whose attempt ran too long or whose lifetime is over.
-- Keys: core, policy, timers, every index of the current state, lane terminal / delayed.
-- Arguments: reason (attempt_timeout | execution_deadline), then execution ids.
-- Replies per id: expired | retry_scheduled | failed (a timeout that counts as a failed attempt) |
--   already_terminal | not_yet_due | not_found_cleaned | error:<why>.
-- Errors: none. Events: completion | released.
-- The record decides when time is up: a damaged timer must not end anything early. Only its timer
-- has what a resumed attempt had left.
local function due_at(c, id, rec, reason)
  if reason == 'execution_deadline' then return rec.execution_deadline_at end
  if rec.resumed_at then return server.call('ZSCORE', K.index(c.tag, reason), id) end
  local started = rec.attempt_started_at or rec.started_at
  return started and rec.attempt_timeout_ms
    and clock.after(tonumber(started), tonumber(rec.attempt_timeout_ms))
end

batch.register_function('ff_expire', 2, function(c, id, args)
  local reason, rec = args[1], record.checked_lease(c, id)
  if not rec or S.is_terminal(rec.state) then
    c:zrem(K.index(c.tag, 'attempt_timeout'), id)
    c:zrem(K.index(c.tag, 'execution_deadline'), id)
    return rec and 'already_terminal' or 'not_found_cleaned'
  end
  local due = due_at(c, id, rec, reason)
  local active = S.is_active(rec.state)
  if not due or tonumber(due) > c.now or (reason == 'attempt_timeout' and not active) then
    return 'not_yet_due'
  end
  local policy = reason == 'attempt_timeout' and retry.policy(c, id)
  local counts_as_failure = retry.on_timeout(policy)
  if counts_as_failure and retry.allowed(c, rec, policy, 'timeout') then
    retry.schedule(c, id, rec, policy, { reason = reason, category = 'timeout',
      ended_by = 'expire', stream_reason = 'expired' })
    return 'retry_scheduled'
  end
  ending.finish(c, id, rec, {
    outcome = counts_as_failure and 'f' or 'x', category = 'timeout', stream_reason = 'expired',
    reason = counts_as_failure and 'failed_terminal' or 'expired:' .. reason,
    close_reason = not counts_as_failure and 'expired:' .. reason or nil,
    fields = { 'failure_reason', reason, 'failure_category', 'timeout', 'ended_by', 'expire' },
  })
  return counts_as_failure and 'failed' or 'expired'
end, { 'allow-oom' })
