-- ff_signal: deliver an authenticated message to a waitpoint; resumes when it satisfies.
-- Keys: core, waitpoint, suspension, condition progress, signal, signals, sigdedup, key store,
--   lane suspended / eligible / delayed, suspension_timeout.
-- Arguments: execution_id, waitpoint_id, signal_id, token, options (msgpack map), has payload
--   (0 | 1), payload, approval (1: the engine itself vouches for the caller).
-- Replies: `accepted`, signal_id, effect | `duplicate`, signal_id, its effect. Errors:
--   execution_not_found, invalid_token, token_expired, hmac_secret_not_initialized, invalid_secret,
--   waitpoint_not_found, invalid_waitpoint_for_execution, invalid_input (lane_mismatch),
--   target_not_signalable, waitpoint_closed, pending_waitpoint_expired, signal_limit_exceeded,
--   signal_bytes_exceeded, corruption. Events: signal,
--   completion (a member of a cancelled flow).
-- A refused call writes nothing, with one exception (05 §6.1): a wrong token sets
--   last_hmac_validation_failed_at on the core, at most once per second and execution.
local DEFAULT_LIMIT = 10000
-- Bytes of payloads that an execution keeps, and those of one waitpoint: a token gives access to a
-- part only.
local MAX_BYTES = 16777216
local MAX_WAITPOINT_BYTES = 4194304
-- What operators have beyond each limit: a token holder cannot use up the room for their answer.
local RESERVED_BYTES = 1048576
local RESERVED_SIGNALS = 100
local STAMP_EVERY_MS = 1000

local function unauthorised(c, id, rec, signal, point, token)
  local problem = tokens.problem(c, token, signal.waitpoint_id, point)
  if problem then
    local last = tonumber(rec.last_hmac_validation_failed_at) or 0
    if math.abs(c.now - last) >= STAMP_EVERY_MS then
      server.call('HSET', K.core(c.tag, id), 'last_hmac_validation_failed_at', c.now)
    end
    return problem
  end
  if point.execution_id ~= id then return reply.err('invalid_waitpoint_for_execution') end
end

local function earlier(id, signal, dedup)
  local known = dedup and server.call('GET', dedup)
  if not known and server.call('EXISTS', K.signal(id, signal.id)) == 1 then known = signal.id end
  return known
    and reply.ok('duplicate', known, server.call('HGET', K.signal(id, known), 'observed_effect'))
end

-- Where the signal goes: `buffer`, or the open suspension with its condition.
local function destination(c, id, rec, point)
  if S.is_terminal(rec.state) then reply.refuse('target_not_signalable') end
  if point.state == 'pending' then
    if tonumber(point.expires_at) < c.now then reply.refuse('pending_waitpoint_expired') end
    return 'buffer'
  end
  if not S.is_suspended(rec.state) then reply.refuse('target_not_signalable') end
  local open = suspension.open(c, id)
  if point.state ~= 'active' or not open or open.suspension_id ~= point.suspension_id then
    reply.refuse('waitpoint_closed')
  end
  if not open.resume_condition_json then reply.refuse('waitpoint_not_found') end
  return open, cjson.decode(open.resume_condition_json)
end

local function excess(c, id, rec, signal, point, buffering, vouched)
  local bytes, count = vouched and RESERVED_BYTES or 0, vouched and RESERVED_SIGNALS or 0
  local all, own, size = MAX_BYTES + bytes, MAX_WAITPOINT_BYTES + bytes, #(signal.payload or '')
  if tonumber(rec.signal_bytes or 0) + size > all then
    return reply.err('signal_bytes_exceeded', values.text(all))
  end
  if tonumber(point.signal_bytes or 0) + size > own then
    return reply.err('signal_bytes_exceeded', values.text(own))
  end
  local most = signal.max_signals or record.policy(c, id).max_signals_per_execution or DEFAULT_LIMIT
  if most > 0 and server.call('ZCARD', K.signals(c.tag, id)) >= most + count then
    return reply.err('signal_limit_exceeded', values.text(most + count))
  end
  -- The condition is not known yet, so any buffered signal may satisfy it.
  local buffer = K.waitpoint_signals(c.tag, signal.waitpoint_id)
  if buffering and server.call('LLEN', buffer) >= signal.maxlen + count then
    return reply.err('signal_limit_exceeded', values.text(signal.maxlen + count))
  end
end

local function apply(c, id, rec, open, signal, verdict)
  if verdict.satisfied then
    local policy = cjson.decode(open.resume_policy_json)
    suspension.resume(c, id, rec, open, {
      reason = 'resumed', condition_reason = 'satisfied', satisfied = true, trigger = 'signal',
      closer = signal.id, delay_ms = tonumber(policy.resume_delay_ms) or signal.resume_delay_ms,
      after = ' after signal ' .. signal.name,
    })
  elseif verdict.fields then
    values.call('HSET', K.marks(c.tag, id), verdict.fields)
    server.call('RPUSH', K.satisfiers(c.tag, id), signal.id)
  end
  server.call('HSET', K.suspension(c.tag, id), 'last_signal_at', c.now)
end

record.register_function('ff_signal', record.checked, function(c, id, rec, args)
  local signal, vouched = cmsgpack.unpack(args[5]), args[8] == '1'
  signal.waitpoint_id, signal.id, signal.payload = args[2], args[3], args[6] == '1' and args[7] or nil
  local point = suspension.read_hash(K.waitpoint(c.tag, signal.waitpoint_id))
  if vouched then
    if not point or point.execution_id ~= id then return reply.err('waitpoint_not_found') end
    reply.stop_with(granting.lane_problem(rec, signal.lane or ''))
  else
    reply.stop_with(unauthorised(c, id, rec, signal, point, args[4]))
  end
  local dedup = signal.idempotency_key ~= '' and signal.dedup_ttl_ms > 0
    and (vouched and K.approval_dedup or K.signal_dedup)(c.tag, signal.waitpoint_id,
      signal.idempotency_key)
  reply.stop_with(earlier(id, signal, dedup))
  local open, condition = destination(c, id, rec, point)
  local buffering = open == 'buffer'
  reply.stop_with(excess(c, id, rec, signal, point, buffering, vouched))

  signal.key, signal.signal_category = point.waitpoint_key, signal.category
  signal.created_at = signal.created_at or c.now
  local verdict = { effect = 'buffered_for_pending_waitpoint' }
  if not buffering then
    verdict = signals.judge(c, id, condition, signal)
    apply(c, id, rec, open, signal, verdict)
  end
  if dedup then server.call('SET', dedup, signal.id, 'PX', signal.dedup_ttl_ms) end
  signals.record(c, id, rec, point, signal, verdict.effect, not buffering and signal.maxlen)
  return reply.ok('accepted', signal.id, verdict.effect)
end, {})
