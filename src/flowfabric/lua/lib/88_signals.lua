-- Recording signals and judging conditions.
local signals = {}

-- What a signal contributes to the open suspension: its effect, and whether it satisfies.
function signals.judge(c, id, open, signal)
  local condition = cjson.decode(open.resume_condition_json)
  local composite = type(condition) == 'table' and condition.Composite
  local made, referred = conditions.marks(condition, signal)
  if #made == 0 then
    if not composite then return 'no_op', false end
    return referred and 'signal_ignored_matcher_failed' or 'signal_ignored_not_in_condition', false
  end
  local marks_key = suspension.marks_key(c, id)
  if server.call('SADD', marks_key, unpack(made)) == 0 then
    return 'appended_to_waitpoint_duplicate', false
  end
  server.call('RPUSH', suspension.satisfiers_key(c, id), signal.id)
  if conditions.satisfied(condition, server.call('SMEMBERS', marks_key)) then
    return 'resume_condition_satisfied', true
  end
  return 'appended_to_waitpoint', false
end

local UNMATCHED = {
  no_op = true, buffered_for_pending_waitpoint = true, signal_ignored_matcher_failed = true,
  signal_ignored_not_in_condition = true,
}

-- Stores an accepted signal with its effect. `trim` bounds the waitpoint's own list.
function signals.record(c, id, rec, signal, effect, trim)
  local key = suspension.signal(c, signal.id)
  local args = {
    'HSET', key, 'target_execution_id', id, 'target_waitpoint_id', signal.waitpoint_id,
    'target_scope', signal.target_scope, 'signal_name', signal.name, 'accepted_at', c.now,
    'observed_effect', effect,
  }
  for _, name in ipairs({ 'signal_category', 'source_type', 'source_identity', 'correlation_id',
    'idempotency_key', 'created_at', 'payload_encoding' }) do
    if signal[name] and signal[name] ~= '' then
      args[#args + 1] = name
      args[#args + 1] = signal[name]
    end
  end
  server.call(unpack(args))
  if signal.payload then server.call('SET', key .. ':payload', signal.payload) end
  local waitpoint = suspension.waitpoint(c, signal.waitpoint_id)
  local list = waitpoint .. ':signals'
  server.call('RPUSH', list, signal.id)
  if trim then server.call('LTRIM', list, -trim, -1) end
  server.call('ZADD', suspension.signals_key(c, id), c.now, signal.id)
  server.call('HINCRBY', waitpoint, 'signal_count', 1)
  if not UNMATCHED[effect] then server.call('HINCRBY', waitpoint, 'matched_signal_count', 1) end
  server.call('HSET', waitpoint, 'last_signal_at', c.now)
  events.emit(c, 'signal', id, rec, 'si', signal.id, 'sn', signal.name, 'wp', signal.waitpoint_id,
    'st', signal.source_type, 'sr', signal.source_identity, 'ef', effect)
end

-- A recorded signal as conditions see it, or nil when it is gone.
function signals.recall(c, signal_id, key)
  local found = server.call('HMGET', suspension.signal(c, signal_id), 'signal_name', 'source_type',
    'source_identity')
  if not found[1] then return nil end
  return { id = signal_id, key = key, name = found[1], source_type = found[2] or '',
    source_identity = found[3] or '' }
end
