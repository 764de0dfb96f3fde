-- ff_change_priority: store a new priority and re-score an eligible execution.
-- Keys: core, lane eligible. Arguments: execution_id, priority, request id (a repeated request gets
--   the same answer and has no second effect).
-- Replies: old, new, the quota policy that it waits for or empty, its new place among those that wait.
-- Errors: execution_not_found, execution_not_eligible. Events: priority_changed.
local MAX_PRIORITY = 9000

local function place_in_line(c, rec)
  if rec.quota_policy_id and S.is_blocked_by_quota(rec.state) then
    return rec.quota_policy_id, values.text(tonumber(c:score(rec)))
  end
  return '', 0
end

record.register_function('ff_change_priority', record.checked, function(c, id, rec, args)
  local before = operator.answered(rec, args[3])
  if before then
    local old, new = string.match(before, '^(%d+) (%d+)$')
    return reply.ok(tonumber(old), tonumber(new), place_in_line(c, rec))
  end
  if not S.is_runnable(rec.state) then return reply.err('execution_not_eligible') end
  local old = tonumber(rec.priority or 0)
  rec.priority = math.max(0, math.min(MAX_PRIORITY, tonumber(args[2])))
  server.call('HSET', K.core(c.tag, id), 'priority', rec.priority, 'last_mutation_at', c.now)
  operator.remember(c, id, rec, args[3], string.format('%d %d', old, rec.priority))
  if S.is_eligible(rec.state) then
    server.call('ZADD', K.eligible(c.tag, rec.lane_id, waiting.signature(rec)), 'XX',
      c:score(rec), id)
  end
  events.emit(c, 'priority_changed', id, rec, 'op', old, 'np', rec.priority)
  return reply.ok(old, rec.priority, place_in_line(c, rec))
end, { 'allow-oom' })
