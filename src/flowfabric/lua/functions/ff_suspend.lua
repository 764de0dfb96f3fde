-- ff_suspend: the lease holder parks its attempt until a condition, a timeout or an operator ends
-- the suspension; or keeps its lease if buffered signals already satisfy the condition.
-- Keys: core, suspension, waitpoints, condition marks, lane active / suspended, lease_expiry,
--   worker leases, timers, suspension_timeout, pending_waitpoint_expiry, key store, suspend dedup.
-- Arguments: execution_id, fence, options (msgpack map: suspension_id, waitpoints [[kind, id, key]],
--   condition, policy, reason_code, requested_by, timeout_at, timeout_behavior, pointer, idem,
--   prompt, details).
-- Replies: `suspended` | `already_satisfied`, attempt, lane, worker, suspension_id, then waitpoint
--   id, key and token of each binding, and for the latter the signal that satisfied.
-- Errors: execution_not_found, those of the fence, invalid_lease_for_suspend, already_suspended,
--   use_pending_with_extras_unsupported, waitpoint_not_found, waitpoint_not_pending,
--   invalid_waitpoint_for_execution, pending_waitpoint_expired, waitpoint_not_token_bound,
--   waitpoint_already_exists, waitpoint_limit_exceeded, additional_waitpoint_binding_malformed,
--   invalid_input, corruption, hmac_secret_not_initialized, invalid_secret.
-- Events: released, expired (a lapsed lease).
local PAST_TOLERANCE_MS = 600000
local DEDUP_TAIL_MS = 60000
local DEDUP_MAX_MS = 604800000
-- How many answers are kept per execution.
local DEDUP_MANY = 100

local function stored_answer(key, name)
  local known = cmsgpack.unpack(server.call('HGET', key, name))
  assert(known.reply[1] == 1 and tonumber(known.expires_at))
  return known
end

-- The first answer to this key, or the error if another lease has used the key, or nil.
local function repeated(c, id, text, want)
  if want.idem == '' then return nil end
  local readable, known = try(stored_answer, K.suspend_dedup(c.tag, id), want.idem)
  if not readable or tonumber(known.expires_at) <= c.now then return nil end
  local given = fence.parse(text)
  if known.lease ~= given.lease_id .. '/' .. given.epoch then
    return reply.err('invalid_input', 'idempotency_key: suspend_idempotency_key_reused')
  end
  return known.reply
end

local function remember(c, id, want, rec, answer)
  if want.idem == '' then return answer end
  local ttl = DEDUP_MAX_MS
  if want.timeout_at then
    ttl = math.min(math.max(want.timeout_at - c.now, 0) + DEDUP_TAIL_MS, DEDUP_MAX_MS)
  end
  local key = K.suspend_dedup(c.tag, id)
  local readable, count = try(server.call, 'HLEN', key)
  if not readable or count >= DEDUP_MANY then server.call('DEL', key) end
  local known = { reply = answer, lease = rec.lease, expires_at = c.now + ttl }
  server.call('HSET', key, want.idem, cmsgpack.pack(known))
  if server.call('PTTL', key) < ttl then server.call('PEXPIRE', key, ttl) end
  return answer
end

local function pending(c, id, rec, waitpoint_id)
  local found = suspension.read_hash(K.waitpoint(c.tag, waitpoint_id))
  if not found then reply.refuse('waitpoint_not_found') end
  if found.state ~= 'pending' then reply.refuse('waitpoint_not_pending') end
  if found.execution_id ~= id
      or tonumber(found.attempt_index) ~= record.attempt_index(rec) then
    reply.refuse('invalid_waitpoint_for_execution')
  end
  if tonumber(found.expires_at or 0) <= c.now then reply.refuse('pending_waitpoint_expired') end
  if not found.waitpoint_token then reply.refuse('waitpoint_not_token_bound') end
  return found
end

local function fresh(c, id, waitpoint_id, key)
  local known = server.call('HMGET', K.waitpoint(c.tag, waitpoint_id), 'state', 'execution_id')
  -- A closed waitpoint may be replaced, but only by its own execution.
  if known[1] and (known[1] == 'pending' or known[1] == 'active' or known[2] ~= id) then
    reply.refuse('waitpoint_already_exists')
  end
  return tokens.mint(c, waitpoint_id, key, c.now)
end

-- Ids, keys and tokens of all bindings, checked and minted before anything is written.
local function bindings(c, id, rec, want)
  local bound = {}
  if want.waitpoints[1][1] ~= 'pending' then
    reply.stop_with(suspension.waitpoint_excess(c, id, #want.waitpoints))
  elseif #want.waitpoints > 1 then
    reply.refuse('use_pending_with_extras_unsupported')
  end
  for i, given in ipairs(want.waitpoints) do
    local kind, waitpoint_id, key = unpack(given)
    local found = kind == 'pending' and pending(c, id, rec, waitpoint_id) or nil
    bound[i] = {
      id = waitpoint_id, record = found, key = found and found.waitpoint_key or key,
      token = found and found.waitpoint_token or fresh(c, id, waitpoint_id, key),
    }
  end
  return bound
end

local function timeout(c, id, want)
  if want.timeout_at then return want.timeout_at, want.timeout_behavior end
  local defaults = record.policy(c, id).suspension_policy
  local after = type(defaults) == 'table' and tonumber(defaults.default_timeout_ms)
  if not after then return nil, want.timeout_behavior end
  return c:after(after),
    want.behavior_given and want.timeout_behavior or defaults.timeout_behavior or 'fail'
end

local function details(outcome, rec, want, bound)
  local answer = reply.ok(outcome, rec.attempt, rec.lane_id, record.worker_instance(rec),
    want.suspension_id)
  for _, binding in ipairs(bound) do
    values.append(answer, { binding.id, binding.key, binding.token })
  end
  return answer
end

-- Evaluates the signals that a pending waitpoint has buffered, in order of acceptance: whether they
-- satisfy the condition, the progress to store, and the signals that contributed.
local function buffered(c, id, binding, condition)
  local progress, fields, satisfiers = {}, {}, {}
  local list = K.waitpoint_signals(c.tag, binding.id)
  for _, signal_id in ipairs(server.call('LRANGE', list, 0, -1)) do
    local found = server.call('HMGET', K.signal(id, signal_id), 'signal_name', 'source_type',
      'source_identity')
    local added = conditions.contribute(progress, found[1] and conditions.marks(condition, {
      id = signal_id, key = binding.key, name = found[1], source_type = found[2] or '',
      source_identity = found[3] or '',
    }) or {})
    if #added > 0 then
      satisfiers[#satisfiers + 1] = signal_id
      values.append(fields, added)
      if conditions.satisfied(condition, progress) then return true, fields, satisfiers end
    end
  end
  return false, fields, satisfiers
end

local function already_satisfied(c, id, rec, want, binding, satisfiers)
  suspension.close_waitpoint(c, binding.id, 'resumed', 'satisfied', true)
  suspension.forget_pending(c, id, binding.id)
  server.call('HSET', K.met(c.tag, id), 'epoch', record.epoch(rec),
    'suspension_id', want.suspension_id, 'signals', table.concat(satisfiers, ','))
  local answer = details('already_satisfied', rec, want, { binding })
  answer[#answer + 1] = satisfiers[#satisfiers]
  return remember(c, id, want, rec, answer)
end

local function write_waitpoint(c, id, rec, want, binding)
  local key = K.waitpoint(c.tag, binding.id)
  if binding.record then
    server.call('HSET', key, 'state', 'active', 'activated_at', c.now,
      'suspension_id', want.suspension_id)
    server.call('HDEL', key, 'expires_at', 'prompt', 'details')
    suspension.forget_pending(c, id, binding.id)
  else
    server.call('DEL', key, K.waitpoint_signals(c.tag, binding.id))
    server.call('HSET', key, 'execution_id', id, 'attempt_index', record.attempt_index(rec),
      'suspension_id', want.suspension_id, 'waitpoint_key', binding.key,
      'waitpoint_token', binding.token, 'state', 'active', 'created_at', c.now,
      'activated_at', c.now)
  end
  if want.timeout_at then server.call('HSET', key, 'expires_at', want.timeout_at) end
  server.call('SADD', K.waitpoints(c.tag, id), binding.id)
end

local function write_suspension(c, id, rec, want, bound, behavior)
  local ids = {}
  -- A waitpoint that was handed out with a question keeps it, unless this wait asks another.
  local asked = (want.prompt or want.details) and want or bound[1].record or want
  for i, binding in ipairs(bound) do ids[i] = binding.id end
  local key = K.suspension(c.tag, id)
  server.call('DEL', key, K.marks(c.tag, id), K.satisfiers(c.tag, id))
  local args = {
    'HSET', key, 'suspension_id', want.suspension_id, 'attempt_index', record.attempt_index(rec),
    'waitpoints', table.concat(ids, ','), 'waitpoint_key', bound[1].key,
    'reason_code', want.reason_code, 'requested_by', want.requested_by, 'created_at', c.now,
    'resume_condition_json', want.condition, 'resume_policy_json', want.policy,
    'timeout_behavior', behavior,
  }
  values.add(args, 'timeout_at', want.timeout_at)
  values.add(args, 'continuation_metadata_pointer', want.pointer)
  values.add(args, 'prompt', asked.prompt)
  values.add(args, 'details', asked.details)
  server.call(unpack(args))
end

local function check_arguments(c, want)
  if want.timeout_at and want.timeout_at + PAST_TOLERANCE_MS < c.now then
    reply.refuse('invalid_input', 'timeout_at_in_past')
  end
  for i = 2, #want.waitpoints do
    if want.waitpoints[i][2] == '' or want.waitpoints[i][3] == '' then
      reply.refuse('additional_waitpoint_binding_malformed')
    end
  end
end

local function check_lease(c, id, rec, text)
  local given = fence.parse(text)
  local proof = given.lease_id .. '/' .. given.epoch .. '/' .. given.attempt_id .. '/'
  reply.stop_with(fence.check(c, id, rec, proof, false, true))
  if given.index ~= '' and tonumber(given.index) ~= record.attempt_index(rec) then
    reply.refuse('invalid_lease_for_suspend')
  end
  if suspension.open(c, id) then reply.refuse('already_suspended') end
end

local function check_references(want, binding)
  for _, key in ipairs(want.referenced) do
    if key ~= binding.key then
      reply.refuse('invalid_input', 'referenced_waitpoint_key_missing_binding: ' .. key)
    end
  end
end

reply.register_function('ff_suspend', function(c, id, args)
  local text, want = args[2], cmsgpack.unpack(args[3])
  check_arguments(c, want)
  reply.stop_with(repeated(c, id, text, want))
  local rec = record.checked_lease(c, id)
  if not rec then return reply.err('execution_not_found') end
  check_lease(c, id, rec, text)
  local bound = bindings(c, id, rec, want)
  local satisfied, progress, satisfiers = false, {}, {}
  if bound[1].record then
    check_references(want, bound[1])
    satisfied, progress, satisfiers = buffered(c, id, bound[1], cjson.decode(want.condition))
    if satisfied then return already_satisfied(c, id, rec, want, bound[1], satisfiers) end
  end

  local behavior
  want.timeout_at, behavior = timeout(c, id, want)
  pausing.release(c, id, rec, suspension.state(want.reason_code), 'suspend:' .. want.suspension_id, {
    current_suspension_id = want.suspension_id, current_waitpoint_id = bound[1].id,
    blocking_detail = 'suspended: waitpoint ' .. bound[1].id .. ' awaiting ' .. want.reason_code,
  }, suspension.score(want.timeout_at))
  if want.timeout_at then
    server.call('ZADD', K.index(c.tag, 'suspension_timeout'), want.timeout_at, id)
  end
  write_suspension(c, id, rec, want, bound, behavior)
  for _, binding in ipairs(bound) do write_waitpoint(c, id, rec, want, binding) end
  values.call('HSET', K.marks(c.tag, id), progress)
  values.call('RPUSH', K.satisfiers(c.tag, id), satisfiers)
  return remember(c, id, want, rec, details('suspended', rec, want, bound))
end, { 'allow-oom' })
