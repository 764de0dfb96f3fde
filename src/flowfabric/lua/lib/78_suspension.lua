-- Suspensions and their waitpoints: keys, closing, and the way back to runnable.
local suspension = {}

-- Lane index score of a suspension without a timeout.
local NO_TIMEOUT = 9999999999999

function suspension.key(c, id) return 'ff:exec:' .. c.tag .. ':' .. id .. ':suspension:current' end
function suspension.marks_key(c, id) return suspension.key(c, id) .. ':satisfied_set' end
function suspension.satisfiers_key(c, id) return suspension.marks_key(c, id) .. ':signals' end
function suspension.waitpoints_key(c, id) return 'ff:exec:' .. c.tag .. ':' .. id .. ':waitpoints' end
function suspension.signals_key(c, id) return 'ff:exec:' .. c.tag .. ':' .. id .. ':signals' end
function suspension.met_key(c, id) return 'ff:exec:' .. c.tag .. ':' .. id .. ':suspension:met' end
function suspension.waitpoint(c, waitpoint_id) return 'ff:wp:' .. c.tag .. ':' .. waitpoint_id end
function suspension.signal(c, signal_id) return 'ff:signal:' .. c.tag .. ':' .. signal_id end

-- reason code -> letter of the blocking reason; anything else waits for a signal.
local BLOCKING = {
  waiting_for_approval = 'a', waiting_for_callback = 'k', waiting_for_tool_result = 't',
  waiting_for_operator_review = 'o', manual_pause = 'o', paused_by_policy = 'p',
  paused_by_budget = 'u',
}
function suspension.state(reason_code) return 'pun' .. (BLOCKING[reason_code] or 's') .. 'ni' end

function suspension.read_hash(key)
  local flat = server.call('HGETALL', key)
  if #flat == 0 then return nil end
  local fields = {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

-- The open suspension, or nil.
function suspension.open(c, id)
  local fields = suspension.read_hash(suspension.key(c, id))
  if fields and not fields.closed_at then return fields end
end

function suspension.score(timeout_at) return tonumber(timeout_at) or NO_TIMEOUT end

-- Closes one waitpoint that is still open.
function suspension.close_waitpoint(c, waitpoint_id, reason, condition_reason, satisfied)
  local key = suspension.waitpoint(c, waitpoint_id)
  local args = { 'HSET', key, 'state', 'closed', 'closed_at', c.now, 'close_reason', reason,
    'condition_closed_reason', condition_reason }
  if satisfied then
    args[#args + 1] = 'satisfied_at'
    args[#args + 1] = c.now
  end
  server.call(unpack(args))
end

-- Closes the open suspension with all its waitpoints and takes it out of its timer.
-- how: reason, condition_reason, satisfied, and `fields`, a flat list for the record.
function suspension.close(c, id, open, how)
  for waitpoint_id in string.gmatch(open.waitpoints, '[^,]+') do
    suspension.close_waitpoint(c, waitpoint_id, how.reason, how.condition_reason or how.reason,
      how.satisfied)
  end
  local args = { 'HSET', suspension.key(c, id), 'closed_at', c.now, 'close_reason', how.reason }
  if how.satisfied then
    args[#args + 1] = 'satisfied_at'
    args[#args + 1] = c.now
  end
  local satisfiers = server.call('LRANGE', suspension.satisfiers_key(c, id), 0, -1)
  if how.satisfied and #satisfiers > 0 then
    args[#args + 1] = 'all_satisfier_signals'
    args[#args + 1] = table.concat(satisfiers, ',')
  end
  for _, value in ipairs(how.fields or {}) do args[#args + 1] = value end
  server.call(unpack(args))
  server.call('DEL', suspension.marks_key(c, id), suspension.satisfiers_key(c, id))
  if open.timeout_at then server.call('ZREM', K.index(c.tag, 'suspension_timeout'), id) end
end

-- Closes what is open of a suspended execution that ends.
function suspension.abandon(c, id, rec, reason)
  local open = suspension.open(c, id)
  if open then suspension.close(c, id, open, { reason = reason }) end
  record.clear(c, id, rec, 'current_suspension_id', 'current_waitpoint_id')
end

-- Makes a suspended execution runnable, at once or after a delay, and closes the suspension.
function suspension.resume(c, id, rec, open, how)
  waiting.leave(c, id, rec)
  record.clear(c, id, rec, 'current_suspension_id', 'current_waitpoint_id', 'blocking_detail')
  local delay = how.delay_ms or 0
  rec.state = S.eligible('i')
  local fields = { state = rec.state, last_transition_at = c.now }
  if delay > 0 then
    fields.state = S.delayed('r', 'i')
    fields.delay_until = c.now + delay
    fields.blocking_detail = how.delay_detail
  end
  record.set(c, id, rec, fields)
  suspension.close(c, id, open, how)
  waiting.enter(c, id, rec)
  c:flush()
  if delay == 0 then c:ring(rec.lane_id) end
end

-- Notes which lease the end of a suspension led to.
function suspension.claimed(c, id, rec)
  server.call('HSET', suspension.key(c, id), 'claimed_epoch', record.epoch(rec))
end

-- Why the attempt goes on under its present lease, or false when no suspension led to it.
function suspension.cause(c, id, rec)
  local found = server.call('HMGET', suspension.key(c, id), 'claimed_epoch', 'suspension_id',
    'resume_trigger', 'close_reason', 'closer_signal_id')
  if tonumber(found[1] or 0) ~= record.epoch(rec) then return false end
  return { found[2], found[3], found[4], found[5] }
end
