-- Suspensions and their waitpoints: closing them, and resuming.

local NO_TIMEOUT_SCORE = 9999999999999
-- How many unused waitpoints one call closes when executions end; the rest expire.
local MAX_DROPPED = 500
-- How many waitpoints an execution may have, closed ones included.
local MAX_WAITPOINTS = 10000

function suspension.waitpoint_excess(c, id, count)
  if server.call('SCARD', K.waitpoints(c.tag, id)) + count > MAX_WAITPOINTS then
    return reply.err('waitpoint_limit_exceeded', values.text(MAX_WAITPOINTS))
  end
end

-- Letter of the blocking reason; any other reason code waits for a signal.
local BLOCKING = {
  waiting_for_approval = 'a', waiting_for_callback = 'k', waiting_for_tool_result = 't',
  waiting_for_operator_review = 'o', manual_pause = 'o', paused_by_policy = 'p',
  paused_by_budget = 'u',
}
function suspension.state(reason_code) return 'pun' .. (BLOCKING[reason_code] or 's') .. 'ni' end

function suspension.read_hash(key)
  local flat = server.call('HGETALL', key)
  if #flat == 0 then return nil end
  return values.fields(flat)
end

function suspension.open(c, id)
  local fields = suspension.read_hash(K.suspension(c.tag, id))
  if fields and not fields.closed_at then return fields end
end

function suspension.score(timeout_at) return tonumber(timeout_at) or NO_TIMEOUT_SCORE end

function suspension.close_waitpoint(c, waitpoint_id, reason, condition_reason, satisfied)
  local args = { 'HSET', K.waitpoint(c.tag, waitpoint_id), 'state', 'closed', 'closed_at', c.now,
    'close_reason', reason, 'condition_closed_reason', condition_reason or reason }
  values.add(args, 'satisfied_at', satisfied and c.now)
  server.call(unpack(args))
end

function suspension.forget_pending(c, id, waitpoint_id)
  server.call('ZREM', K.index(c.tag, 'pending_waitpoint_expiry'), waitpoint_id)
  server.call('SREM', K.pending_waitpoints(c.tag, id), waitpoint_id)
end

function suspension.drop_pending(c, id, rec, reason)
  if not rec.waitpointed then return end
  local pending = K.pending_waitpoints(c.tag, id)
  c.dropped = c.dropped or 0
  for _, waitpoint_id in ipairs(server.call('SPOP', pending, MAX_DROPPED - c.dropped)) do
    c.dropped = c.dropped + 1
    suspension.close_waitpoint(c, waitpoint_id, reason)
    c:zrem(K.index(c.tag, 'pending_waitpoint_expiry'), waitpoint_id)
  end
  server.call('DEL', pending)
  record.clear(c, id, rec, 'waitpointed')
end

-- Closes the open suspension, its timer and all its open waitpoints.
-- how: reason, condition_reason, satisfied, closer (signal id), trigger.
function suspension.close(c, id, open, how)
  local satisfiers = server.call('LRANGE', K.satisfiers(c.tag, id), 0, -1)
  satisfiers[#satisfiers + 1] = how.closer
  local args = { 'HSET', K.suspension(c.tag, id), 'closed_at', c.now, 'close_reason', how.reason }
  values.add(args, 'resume_trigger', how.trigger)
  values.add(args, 'closer_signal_id', how.closer)
  if how.satisfied then
    values.add(args, 'satisfied_at', c.now)
    values.add(args, 'all_satisfier_signals', table.concat(satisfiers, ','))
  end
  server.call(unpack(args))
  reply.add_effect('S' .. how.reason .. ':' .. values.text(c.now - (tonumber(open.created_at) or c.now)))
  server.call('DEL', K.marks(c.tag, id), K.satisfiers(c.tag, id))
  if open.timeout_at then server.call('ZREM', K.index(c.tag, 'suspension_timeout'), id) end
  for waitpoint_id in string.gmatch(open.waitpoints, '[^,]+') do
    -- A waitpoint that was closed earlier keeps its reason.
    if server.call('HGET', K.waitpoint(c.tag, waitpoint_id), 'state') == 'active' then
      suspension.close_waitpoint(c, waitpoint_id, how.reason, how.condition_reason, how.satisfied)
    end
  end
end

-- Makes a suspended execution runnable, at once or after a delay, and closes the suspension.
-- how: as for `close`; also delay_ms, and a text `after` it for operators.
function suspension.resume(c, id, rec, open, how)
  local f = flow.ending_member(c, rec, true)
  if f then return ending.cancel(c, id, rec, 'flow_cascade', f.cancel_reason) end
  waiting.leave(c, id, rec)
  local delay = how.delay_ms or 0
  if delay > 0 then
    record.transition(c, id, rec, S.delayed('r', 'i'),
      'last_transition_at', c.now, 'delay_until', c:after(delay),
      'blocking_detail', string.format('resume delay %.0fms', delay) .. (how.after or ''))
  else
    record.transition(c, id, rec, S.eligible('i'), 'last_transition_at', c.now)
    record.clear(c, id, rec, 'blocking_detail')
  end
  record.clear(c, id, rec, 'current_suspension_id', 'current_waitpoint_id')
  waiting.enter(c, id, rec)
  suspension.close(c, id, open, how)
  if delay == 0 then waiting.ring(c, rec) end
end

-- Why the attempt was resumed under its current lease; false if it was not suspended.
function suspension.cause(c, id, rec)
  local found = server.call('HMGET', K.suspension(c.tag, id), 'claimed_epoch', 'suspension_id',
    'resume_trigger', 'close_reason', 'closer_signal_id')
  if tonumber(found[1] or 0) ~= record.epoch(rec) then return false end
  return { found[2], found[3], found[4], found[5] }
end
