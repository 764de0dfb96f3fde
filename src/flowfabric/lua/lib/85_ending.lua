-- The only way into a terminal state.

local DEFAULT_RETENTION_MS = 86400000
local NONE = {}
local RESULT = { 'rr', '1' }
-- Larger tags are not copied to the feed; readers that filter by tags then read them separately.
local MAX_TAGS_BYTES = 4096

local function tags_of(c, id, rec)
  if (tonumber(rec.tagged) or 0) > MAX_TAGS_BYTES then return nil end
  local text = cjson.encode(values.fields(server.call('HGETALL', K.tags(c.tag, id))))
  return #text <= MAX_TAGS_BYTES and text or nil
end

local function extras(c, id, rec, how)
  if not (how.source or how.category or rec.tagged) then return how.result and RESULT or NONE end
  local fields = {}
  values.add(fields, 's', how.source)
  values.add(fields, 'c', how.category)
  values.add(fields, 'rr', how.result and '1')
  values.add(fields, 'tg', rec.tagged and tags_of(c, id, rec))
  return fields
end

-- When an ended execution is deleted; `moment`: when it ended, if the record does not say so yet.
function ending.purge_due(id, rec, moment)
  moment = moment or tonumber(rec.completed_at) or error(id .. ': completed_at: is missing', 0)
  local due = clock.after(moment, tonumber(rec.retention_ms or DEFAULT_RETENTION_MS))
  -- A member that others still need is kept longer.
  return rec.kept_until and math.max(due, tonumber(rec.kept_until)) or due
end

-- Ends an execution from any phase. how: outcome (letter), reason of the event; optional: fields
-- (flat list for the record), source, category for the event, result (bytes), stream_reason for the
-- attempt's stream, close_reason for open waitpoints. Dependents are resolved in the same call.
function ending.finish(c, id, rec, how)
  local state = S.terminal(how.outcome, S.attempt(rec.state), rec.attempt)
  local held = S.is_active(rec.state)
  -- Before any write, because a damaged record stops the call here.
  local purge_due = values.text(ending.purge_due(id, rec, c.now))
  streams.close(c, id, rec, how.stream_reason)
  if held then
    lease.leave_indexes(c, id, rec)
  else
    local open = S.is_suspended(rec.state) and suspension.open(c, id)
    if open then suspension.close(c, id, open, { reason = how.close_reason }) end
    if rec.grant_expires_at and rec.quota_policy_id then
      admission.give_back_slot(c, id, rec, admission.run(rec) + 1)
    end
    admission.forget_waiting(c, id, rec)
    waiting.leave(c, id, rec)
    if rec.attempt and S.between_attempts(rec.state) then
      record.set(c, id, rec, 'between_attempts', '1')
    end
  end
  if rec.state ~= S.ACTIVE then
    record.clear(c, id, rec, 'blocking_detail', 'delay_until', 'lease_expired_at',
      'lease_revoked_at', 'lease_revoke_reason', 'current_suspension_id', 'current_waitpoint_id',
      'retry_at')
  end
  suspension.drop_pending(c, id, rec, how.close_reason or 'never_committed')
  if rec.execution_deadline_at then c:zrem(K.index(c.tag, 'execution_deadline'), id) end
  local now, result, fields = values.text(c.now), how.result, how.fields or NONE
  if result and record.is_small(result) then
    record.transition(c, id, rec, state, 'completed_at', now, 'result', result, unpack(fields))
  else
    record.transition(c, id, rec, state, 'completed_at', now, unpack(fields))
    if result then server.call('SET', K.result(c.tag, id), result) end
  end
  c:zadd(K.lane(c.tag, rec.lane_id, 'terminal'), purge_due, id)
  local outcome, more = S.outcome_name(state), extras(c, id, rec, how)
  if held then
    events.emit(c, 'completion', id, rec, 'o', outcome, 'r', how.reason, 'A', rec.attempt,
      'L', rec.lease, 'w', rec.worker, unpack(more))
  elseif rec.attempt then
    events.emit(c, 'completion', id, rec, 'o', outcome, 'r', how.reason, 'A', rec.attempt,
      unpack(more))
  else
    events.emit(c, 'completion', id, rec, 'o', outcome, 'r', how.reason, unpack(more))
  end
  if rec.out then cascade.ended(c, id, rec) end
  if rec.subflow then subflows.abandon(c, rec) end
end

-- Escaped, because lanes may contain the separators of effects; engine/valkey/effects.py decodes it.
local effect_lane = values.memo(function(lane)
  return (string.gsub(lane, '[ %%:]', { [' '] = '%20', ['%'] = '%25', [':'] = '%3A' }))
end)

-- `fields`: further ones for the record.
function ending.cancel(c, id, rec, source, reason, fields)
  fields = fields or {}
  record.add_or_clear(c, id, rec, fields, 'cancelled_by', source)
  record.add_or_clear(c, id, rec, fields, 'cancellation_reason', reason)
  if S.has_running_attempt(rec.state) or S.has_paused_attempt(rec.state) then
    reply.add_effect('A' .. effect_lane(rec.lane_id) .. ':cancelled')
  end
  ending.finish(c, id, rec, {
    outcome = 'c', reason = 'cancelled', source = source ~= '' and source or nil,
    close_reason = 'cancelled', stream_reason = 'attempt_cancelled', fields = fields,
  })
end

-- Ends a member whose dependencies can no longer be met.
function ending.skip(c, id, rec, fields)
  local reason = 'dependency_impossible'
  if S.has_paused_attempt(rec.state) then values.append(fields, { 'failure_reason', reason }) end
  ending.finish(c, id, rec, {
    outcome = 'k', reason = 'skipped', stream_reason = reason, close_reason = reason,
    fields = fields,
  })
end
