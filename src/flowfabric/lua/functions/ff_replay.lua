-- ff_replay: run a terminal execution again under the same id.
-- Keys: core, policy, result, attempt, steps, waitpoints, lane terminal, lane eligible, execution_deadline.
-- Arguments: execution_id, reason, requested_by, expected replay count or empty, keep steps (0 | 1),
--   request id (a repeated request gets the same answer and has no second effect).
-- Replies: public_state. Errors: execution_not_found, execution_not_terminal,
--   max_replays_exhausted, replay_not_allowed, corruption. Events: replayed.
local DEFAULT_MAX_REPLAYS = 10

-- The record has the last failure of any attempt; the archive only what ended this one.
local function ended_with(rec)
  if S.is_success(rec.state) then return nil end
  if S.is_cancelled(rec.state) then
    return { failure_reason = 'cancelled: ' .. (rec.cancellation_reason or '') }
  end
  return { failure_reason = rec.failure_reason, failure_category = rec.failure_category,
    ended_by = rec.ended_by }
end

record.register_function('ff_replay', record.checked, function(c, id, rec, args)
  local reason, requested_by, keeps_steps = args[2], args[3], args[5] == '1'
  -- First, because the new run may have ended before the repeat arrives.
  if operator.answered(rec, args[6]) then return reply.ok('waiting') end
  if not S.is_terminal(rec.state) then return reply.err('execution_not_terminal') end
  local policy, readable = record.policy(c, id)
  if not readable then return reply.err('corruption', id .. ': policy: is not a JSON object') end
  local count = tonumber(rec.replay_count or 0)
  if count >= tonumber(policy.max_replay_count or DEFAULT_MAX_REPLAYS) then
    return reply.err('max_replays_exhausted')
  end
  if args[4] ~= '' and tonumber(args[4]) ~= count then
    return reply.err('replay_not_allowed', tostring(count))
  end

  if S.has_ended_attempt(rec.state)
      and server.call('EXISTS', K.attempt(c.tag, id, record.attempt_index(rec))) == 0 then
    local ended = rec.ended_by == 'reclaim_cap' and 'interrupted_reclaimed'
      or S.attempt_end(rec.state)
    record.archive(c, id, rec, ended, ended_with(rec))
  end
  server.call('DEL', K.result(c.tag, id))
  if not keeps_steps then server.call('DEL', K.steps(c.tag, id)) end
  record.clear(c, id, rec, 'completed_at', 'failure_reason', 'failure_category',
    'cancellation_reason', 'cancelled_by', 'result_encoding', 'ended_by', 'retry_count',
    'lease_reclaim_count', 'progress_pct', 'progress_message', 'progress_updated_at',
    'execution_deadline_at', 'paused', 'delay_until', 'pending_replay_reason',
    'pending_replay_requested_by', 'attempt_timeout_remaining_ms', 'suspended_at',
    'between_attempts')
  local fields = { 'replay_count', count + 1, 'last_transition_at', c.now }
  operator.remember(c, id, rec, args[6], 'waiting')
  -- Earlier answers belong to the earlier run, like its steps.
  if not keeps_steps and server.call('EXISTS', K.waitpoints(c.tag, id)) == 1 then
    values.add(fields, 'run_from', record.attempt_count(rec))
  end
  values.add(fields, 'pending_replay_reason', reason)
  values.add(fields, 'pending_replay_requested_by', requested_by)
  local lifetime = tonumber((policy.timeout_policy or {}).execution_deadline_ms or 0)
  if lifetime > 0 then
    values.add(fields, 'execution_deadline_at', c:after(lifetime))
    c:zadd(K.index(c.tag, 'execution_deadline'), c:after(lifetime), id)
  end
  c:zrem(K.lane(c.tag, rec.lane_id, 'terminal'), id)
  record.transition(c, id, rec, S.eligible('p'), unpack(fields))
  waiting.enter(c, id, rec)
  local details = { 'b', 'normal', 'rc', count + 1 }
  values.add(details, 'by', requested_by)
  values.add(details, 'r', reason)
  events.emit(c, 'replayed', id, rec, unpack(details))
  waiting.ring(c, rec)
  return reply.ok(S.public(rec.state))
end, {})
