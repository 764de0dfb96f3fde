-- ff_expire_suspension: apply the timeout behaviour of suspensions that are due.
-- Keys: core, suspension, its waitpoints, suspension_timeout, lane suspended / eligible / terminal.
-- Arguments: any number of execution ids.
-- Replies per id: behaviour applied (fail | cancel | expire | auto_resume | escalate) |
--   not_found_cleaned | not_suspended_cleaned | no_active_suspension_cleaned | not_yet_due |
--   error:<why>. Errors: none. Events: completion | resumed | escalated.
local OUTCOMES = { fail = 'f', cancel = 'c', expire = 'x' }

local function finish(c, id, rec, behavior)
  local reason = 'suspension_timeout:' .. behavior
  local fields = { 'failure_reason', reason, 'ended_by', 'suspension_timeout' }
  if behavior == 'cancel' then
    values.append(fields, { 'cancelled_by', 'system_timeout', 'cancellation_reason', reason })
  end
  ending.finish(c, id, rec, {
    outcome = OUTCOMES[behavior], reason = reason, fields = fields,
    source = behavior == 'cancel' and 'system_timeout' or nil,
    close_reason = 'timed_out_' .. behavior, stream_reason = 'suspension_timeout',
  })
  return behavior
end

local function auto_resume(c, id, rec, open)
  suspension.resume(c, id, rec, open, { reason = 'timed_out_auto_resume', trigger = 'timeout' })
  events.emit(c, 'resumed', id, rec, 'su', open.suspension_id, 'tr', 'timeout',
    'cr', 'timed_out_auto_resume')
  return 'auto_resume'
end

local function escalate(c, id, rec, open)
  record.transition(c, id, rec, suspension.state('waiting_for_operator_review'),
    'last_transition_at', c.now,
    'blocking_detail', 'suspension escalated: timeout at ' .. open.timeout_at)
  local key = K.suspension(c.tag, id)
  server.call('HSET', key, 'reason_code', 'waiting_for_operator_review')
  server.call('HDEL', key, 'timeout_at', 'timeout_behavior')
  server.call('ZREM', K.index(c.tag, 'suspension_timeout'), id)
  server.call('ZADD', K.lane(c.tag, rec.lane_id, 'suspended'), suspension.score(nil), id)
  for waitpoint_id in string.gmatch(open.waitpoints, '[^,]+') do
    server.call('HDEL', K.waitpoint(c.tag, waitpoint_id), 'expires_at')
  end
  events.emit(c, 'escalated', id, rec, 'su', open.suspension_id, 'tr', 'timeout',
    'cr', 'escalated')
  return 'escalate'
end

batch.register_function('ff_expire_suspension', 1, function(c, id)
  local index = K.index(c.tag, 'suspension_timeout')
  local rec = record.checked(c, id)
  local open = rec and S.is_suspended(rec.state) and suspension.open(c, id)
  if not open then
    server.call('ZREM', index, id)
    if not rec then return 'not_found_cleaned' end
    return S.is_suspended(rec.state) and 'no_active_suspension_cleaned' or 'not_suspended_cleaned'
  end
  if not open.timeout_at then server.call('ZREM', index, id) end
  if not open.timeout_at or tonumber(open.timeout_at) > c.now then return 'not_yet_due' end
  local behavior = open.timeout_behavior
  if behavior == 'auto_resume' or behavior == 'auto_resume_with_timeout_signal' then
    return auto_resume(c, id, rec, open)
  end
  if behavior == 'escalate' then return escalate(c, id, rec, open) end
  return finish(c, id, rec, OUTCOMES[behavior] and behavior or 'fail')
end, { 'allow-oom' })
