-- ff_signal: deliver an authenticated message to a waitpoint; resumes when it satisfies.
-- Keys: core, waitpoint, suspension, condition marks, signal, signals, sigdedup, key store,
--   lane suspended / eligible / delayed, suspension_timeout.
-- Arguments: execution_id, waitpoint_id, signal_id, token, options (msgpack map), has payload
--   (0 | 1), payload, approval (1: the engine itself vouches for the caller).
-- Replies: `accepted`, signal_id, effect | `duplicate`, signal_id. Errors: execution_not_found,
--   invalid_token, token_expired, hmac_secret_not_initialized, invalid_secret,
--   waitpoint_not_found, invalid_waitpoint_for_execution, target_not_signalable, waitpoint_closed,
--   pending_waitpoint_expired, signal_limit_exceeded. Events: signal.
local DEFAULT_LIMIT = 10000

-- nil when the token is good for this waitpoint, else the error.
local function unauthorised(c, id, waitpoint_id, point, token)
  local secret, problem, code = tokens.secret_for(c, token)
  if not problem and (not point or not point.created_at
      or not tokens.proves(secret, code, waitpoint_id, point.waitpoint_key, point.created_at)) then
    problem = reply.err('invalid_token')
  end
  if problem then
    server.call('HSET', K.core(c.tag, id), 'last_hmac_validation_failed_at', c.now)
  end
  return problem
end

local function limit(c, id, want)
  if want.max_signals then return want.max_signals end
  local text = server.call('GET', K.policy(c.tag, id))
  return text and cjson.decode(text).max_signals_per_execution or DEFAULT_LIMIT
end

-- Where the signal goes: `buffer`, the open suspension, or the error.
local function destination(c, id, rec, waitpoint_id, point)
  local phase = S.phase(rec.state)
  if phase == 't' then return nil, reply.err('target_not_signalable') end
  if point.state == 'pending' then
    if tonumber(point.expires_at) < c.now then
      return nil, reply.err('pending_waitpoint_expired')
    end
    return 'buffer'
  end
  if phase ~= 'p' then return nil, reply.err('target_not_signalable') end
  local open = suspension.open(c, id)
  if point.state ~= 'active' or not open or open.suspension_id ~= point.suspension_id then
    return nil, reply.err('waitpoint_closed')
  end
  return open
end

local function resume(c, id, rec, open, signal, want)
  local policy = cjson.decode(open.resume_policy_json)
  local delay = tonumber(policy.resume_delay_ms) or want.resume_delay_ms or 0
  suspension.resume(c, id, rec, open, {
    reason = 'resumed', condition_reason = 'satisfied', satisfied = true, delay_ms = delay,
    delay_detail = 'resume delay ' .. delay .. 'ms after signal ' .. signal.name,
    fields = { 'closer_signal_id', signal.id, 'resume_trigger', 'signal' },
  })
end

server.register_function('ff_signal', function(keys, args)
  local c = Context.open(keys[1])
  local id, waitpoint_id, signal_id, token = args[1], args[2], args[3], args[4]
  local want, vouched = cmsgpack.unpack(args[5]), args[8] == '1'
  local rec = record.read(c, id)
  if not rec then return reply.err('execution_not_found') end
  local point = suspension.read_hash(suspension.waitpoint(c, waitpoint_id))
  if vouched then
    if not point or point.execution_id ~= id then return reply.err('waitpoint_not_found') end
  else
    local problem = unauthorised(c, id, waitpoint_id, point, token)
    if problem then return problem end
  end
  if point.execution_id ~= id then return reply.err('invalid_waitpoint_for_execution') end
  local dedup = want.idempotency_key ~= '' and 'ff:sigdedup:' .. c.tag .. ':' .. waitpoint_id
    .. ':' .. want.idempotency_key
  local known = dedup and server.call('GET', dedup)
  if known then return reply.ok('duplicate', known) end
  if server.call('EXISTS', suspension.signal(c, signal_id)) == 1 then
    return reply.ok('duplicate', signal_id)
  end
  local open, problem = destination(c, id, rec, waitpoint_id, point)
  if problem then return problem end
  local most = limit(c, id, want)
  local count = server.call('ZCARD', suspension.signals_key(c, id))
  if most > 0 and count >= most then return reply.err('signal_limit_exceeded', tostring(most)) end

  local signal = {
    id = signal_id, waitpoint_id = waitpoint_id, key = point.waitpoint_key, name = want.name,
    signal_category = want.category, source_type = want.source_type,
    source_identity = want.source_identity, correlation_id = want.correlation_id,
    idempotency_key = want.idempotency_key, target_scope = want.target_scope,
    created_at = want.created_at or c.now, payload_encoding = want.payload_encoding,
    payload = args[6] == '1' and args[7] or nil,
  }
  local effect, satisfied = 'buffered_for_pending_waitpoint', false
  if open ~= 'buffer' then
    effect, satisfied = signals.judge(c, id, open, signal)
    server.call('HSET', suspension.key(c, id), 'last_signal_at', c.now)
  elseif server.call('LLEN', suspension.waitpoint(c, waitpoint_id) .. ':signals') >= want.maxlen then
    return reply.err('signal_limit_exceeded', tostring(want.maxlen))
  end
  if dedup and want.dedup_ttl_ms > 0 then server.call('SET', dedup, signal_id, 'PX', want.dedup_ttl_ms) end
  signals.record(c, id, rec, signal, effect, open ~= 'buffer' and want.maxlen or nil)
  if satisfied then resume(c, id, rec, open, signal, want) end
  return reply.ok('accepted', signal_id, effect)
end)
