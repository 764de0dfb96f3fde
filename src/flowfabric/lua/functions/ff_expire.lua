-- ff_expire: end executions whose attempt ran too long or whose lifetime is over.
-- Keys: core, policy, timers, every index of the current state, lane terminal / delayed.
-- Arguments: reason (attempt_timeout | execution_deadline), then execution ids.
-- Replies per id: expired | retry_scheduled | failed (a timeout that counts as a failed attempt) |
--   already_terminal | not_yet_due | not_found_cleaned | error:<why>.
-- Errors: none. Events: completion | released.
local function drop_timers(c, id)
  c:zrem(K.index(c.tag, 'attempt_timeout'), id)
  c:zrem(K.index(c.tag, 'execution_deadline'), id)
end

-- When the time is over. The record decides: a damaged timer must not end anything early. What a
-- resumed attempt had left is in its timer alone.
local function due_at(c, id, rec, reason)
  if reason == 'execution_deadline' then return rec.execution_deadline_at end
  if rec.resumed_at then return server.call('ZSCORE', K.index(c.tag, reason), id) end
  local started = rec.attempt_started_at or rec.started_at
  return started and rec.attempt_timeout_ms
    and clock.after(tonumber(started), tonumber(rec.attempt_timeout_ms))
end

local function expire(c, id, reason)
  local rec = record.checked_lease(c, id)
  if not rec then
    drop_timers(c, id)
    return 'not_found_cleaned'
  end
  if S.is_terminal(rec.state) then
    drop_timers(c, id)
    return 'already_terminal'
  end
  local due = due_at(c, id, rec, reason)
  local active = S.is_active(rec.state)
  if not due or tonumber(due) > c.now or (reason == 'attempt_timeout' and not active) then
    return 'not_yet_due'
  end
  if reason == 'attempt_timeout' then
    local policy = retry.policy(c, id)
    if retry.on_timeout(policy) then
      if retry.allowed(rec, policy, 'timeout') then
        retry.schedule(c, id, rec, policy,
          { reason = 'attempt_timeout', category = 'timeout', ended_by = 'expire',
            stream_reason = 'expired' })
        return 'retry_scheduled'
      end
      ending.finish(c, id, rec, {
        outcome = 'f', reason = 'failed_terminal', category = 'timeout', stream_reason = 'expired',
        fields = { 'failure_reason', reason, 'failure_category', 'timeout', 'ended_by', 'expire' },
      })
      return 'failed'
    end
  end
  ending.finish(c, id, rec, {
    outcome = 'x', reason = 'expired:' .. reason, category = 'timeout',
    close_reason = 'expired:' .. reason, stream_reason = 'expired',
    fields = { 'failure_reason', reason, 'failure_category', 'timeout', 'ended_by', 'expire' },
  })
  return 'expired'
end

register('ff_expire', function(keys, args)
  local c = Context.open(keys[1], true)
  local replies = batch.each(args, 2, function(id) return expire(c, id, args[1]) end)
  c:flush()
  return reply.ok(replies)
end, { 'allow-oom' })
