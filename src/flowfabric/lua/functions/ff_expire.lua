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

local function expire(c, id, reason)
  local rec = record.checked_lease(c, id)
  if not rec then
    drop_timers(c, id)
    return 'not_found_cleaned'
  end
  if S.phase(rec.state) == 't' then
    drop_timers(c, id)
    return 'already_terminal'
  end
  local due = server.call('ZSCORE', K.index(c.tag, reason), id)
  local active = S.phase(rec.state) == 'a'
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
end)
