-- Recording signals and deciding their effect.

-- The effect of a signal on the open suspension; writes nothing.
function signals.judge(c, id, condition, signal)
  local made, referred = conditions.marks(condition, signal)
  if #made == 0 then
    if type(condition) ~= 'table' or not condition.Composite then return { effect = 'no_op' } end
    return { effect = referred and 'signal_ignored_matcher_failed'
      or 'signal_ignored_not_in_condition' }
  end
  local progress = conditions.progress(K.marks(c.tag, id), condition, made)
  local fields = conditions.contribute(progress, made)
  if #fields == 0 then return { effect = 'appended_to_waitpoint_duplicate' } end
  if conditions.satisfied(condition, progress) then
    return { effect = 'resume_condition_satisfied', satisfied = true }
  end
  return { effect = 'appended_to_waitpoint', fields = fields }
end

local UNMATCHED = {
  no_op = true, buffered_for_pending_waitpoint = true, signal_ignored_matcher_failed = true,
  signal_ignored_not_in_condition = true,
}
local EVIDENCE = { appended_to_waitpoint = true, resume_condition_satisfied = true }
local OPTIONAL = { 'signal_category', 'source_type', 'source_identity', 'correlation_id',
  'idempotency_key', 'created_at', 'payload_encoding' }

-- Stores an accepted signal with its effect. `most` limits the waitpoint's list, but never drops a
-- signal that contributed to its condition, because a restarted handler evaluates the list.
function signals.record(c, id, rec, point, signal, effect, most)
  local args = {
    'HSET', K.signal(id, signal.id), 'target_waitpoint_id', signal.waitpoint_id,
    'target_scope', signal.target_scope, 'signal_name', signal.name, 'accepted_at', c.now,
    'observed_effect', effect,
  }
  for _, name in ipairs(OPTIONAL) do values.add(args, name, signal[name]) end
  server.call(unpack(args))
  local waitpoint = K.waitpoint(c.tag, signal.waitpoint_id)
  if signal.payload then
    local size = #signal.payload
    server.call('SET', K.signal_payload(id, signal.id), signal.payload)
    record.set(c, id, rec, 'signal_bytes', tonumber(rec.signal_bytes or 0) + size)
    server.call('HSET', waitpoint, 'signal_bytes', tonumber(point.signal_bytes or 0) + size)
  end
  local list = K.waitpoint_signals(c.tag, signal.waitpoint_id)
  if not most or EVIDENCE[effect] or server.call('LLEN', list) < most then
    server.call('RPUSH', list, signal.id)
  end
  server.call('ZADD', K.signals(c.tag, id), c.now, signal.id)
  server.call('HINCRBY', waitpoint, 'signal_count', 1)
  if not UNMATCHED[effect] then server.call('HINCRBY', waitpoint, 'matched_signal_count', 1) end
  server.call('HSET', waitpoint, 'last_signal_at', c.now)
  events.emit(c, 'signal', id, rec, 'si', signal.id, 'sn', signal.name, 'wp', signal.waitpoint_id,
    'st', signal.source_type, 'sr', signal.source_identity, 'ef', effect)
end
