-- The one way into a terminal state.
local ending = {}

local DEFAULT_RETENTION_MS = 86400000
local OUTCOME_NAMES = { s = 'success', f = 'failed', c = 'cancelled', x = 'expired', k = 'skipped' }

-- Ends an execution from any phase. `how`: outcome letter, event reason, and
-- `fields`, a flat list of record fields to store; source and category for the event;
-- `stream_reason` for the attempt's stream, `close_reason` for open waitpoints.
function ending.finish(c, id, rec, how)
  local args = {
    'HSET', K.core(c.tag, id), 'state',
    S.terminal(how.outcome, S.attempt(rec.state), rec.attempt), 'completed_at', c:text(c.now),
  }
  for _, value in ipairs(how.fields or {}) do args[#args + 1] = value end
  local held = S.phase(rec.state) == 'a'
  server.call(unpack(args))
  streams.close(c, id, rec, how.stream_reason)
  if held then
    lease.leave_indexes(c, id, rec)
  else
    if S.phase(rec.state) == 'p' then suspension.abandon(c, id, rec, how.close_reason) end
    waiting.leave(c, id, rec)
    lease.drop_grant(c, id, rec)
  end
  if rec.state ~= S.ACTIVE then
    record.clear(c, id, rec, 'blocking_detail', 'delay_until', 'lease_expired_at',
      'lease_revoked_at', 'lease_revoke_reason')
  end
  suspension.drop_pending(c, id, rec, how.close_reason or 'never_committed')
  if rec.execution_deadline_at then c:zrem(K.index(c.tag, 'execution_deadline'), id) end
  rec.state = args[4]
  rec.completed_at = c.now
  c:zadd(K.lane(c.tag, rec.lane_id, 'terminal'),
    c:text(c.now + tonumber(rec.retention_ms or DEFAULT_RETENTION_MS)), id)
  local told = { 'o', OUTCOME_NAMES[how.outcome], 'r', how.reason }
  local function tell(name, value)
    told[#told + 1] = name
    told[#told + 1] = value
  end
  if rec.attempt then tell('A', rec.attempt) end
  if held then
    tell('L', rec.lease)
    tell('w', rec.worker)
  end
  if how.source then tell('s', how.source) end
  if how.category then tell('c', how.category) end
  if how.has_result then tell('rr', '1') end
  events.emit(c, 'completion', id, rec, unpack(told))
end
