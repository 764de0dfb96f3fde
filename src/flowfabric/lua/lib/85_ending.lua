-- The one way into a terminal state.
local ending = {}

local DEFAULT_RETENTION_MS = 86400000
local OUTCOME_NAMES = { s = 'success', f = 'failed', c = 'cancelled', x = 'expired', k = 'skipped' }

-- Ends an execution from any phase. `how`: outcome letter, event reason, and
-- `fields`, a flat list of record fields to store; source and category for the event.
function ending.finish(c, id, rec, how)
  local args = {
    'HSET', K.core(c.tag, id), 'state',
    S.terminal(how.outcome, S.attempt(rec.state), rec.attempt), 'completed_at', c.now,
  }
  for _, value in ipairs(how.fields or {}) do args[#args + 1] = value end
  local held = S.phase(rec.state) == 'a'
  server.call(unpack(args))
  if held then
    lease.leave_indexes(c, id, rec)
  else
    waiting.leave(c, id, rec)
    lease.drop_grant(c, id, rec)
  end
  if rec.state ~= S.ACTIVE then
    record.clear(c, id, rec, 'blocking_detail', 'delay_until', 'lease_expired_at',
      'lease_revoked_at', 'lease_revoke_reason')
  end
  if rec.execution_deadline_at then c:zrem(K.index(c.tag, 'execution_deadline'), id) end
  rec.state = args[4]
  rec.completed_at = c.now
  c:zadd(K.lane(c.tag, rec.lane_id, 'terminal'),
    c.now + tonumber(rec.retention_ms or DEFAULT_RETENTION_MS), id)
  events.emit(c, 'completion', id, rec, 'o', OUTCOME_NAMES[how.outcome], 'r', how.reason,
    'f', held and events.fence(rec) or (rec.attempt and '//' .. rec.attempt) or false,
    'w', held and rec.worker or false, 's', how.source or false,
    'c', how.category or false, 'rr', how.has_result and '1' or false)
end
