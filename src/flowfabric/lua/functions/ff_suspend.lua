-- ff_suspend: the lease holder parks its attempt until a condition, a timeout or an operator
-- ends the pause; or goes on when buffered signals already satisfy the condition.
-- Keys: core, suspension, waitpoints, condition marks, lane active / suspended, lease_expiry,
--   worker leases, timers, suspension_timeout, pending_waitpoint_expiry, key store, suspend dedup.
-- Arguments: execution_id, fence, options (msgpack map: suspension_id, waitpoints [[kind, id, key]],
--   condition, policy, reason_code, requested_by, timeout_at, timeout_behavior, pointer, idem).
-- Replies: `suspended` | `already_satisfied`, then suspension_id, waitpoint id, key and token of
--   each binding. Errors: those of the fence, invalid_lease_for_suspend, already_suspended,
--   use_pending_with_extras_unsupported, waitpoint_not_found, waitpoint_not_pending,
--   invalid_waitpoint_for_execution, pending_waitpoint_expired, waitpoint_not_token_bound,
--   waitpoint_already_exists, additional_waitpoint_binding_malformed, invalid_input,
--   hmac_secret_not_initialized, invalid_secret. Events: released.
local DEDUP_TAIL_MS = 60000
local DEDUP_MAX_MS = 604800000

local function dedup_key(c, id, idem) return 'ff:dedup:suspend:' .. c.tag .. ':' .. id .. ':' .. idem end

-- The first answer to this key, or the error of a key that was used for another pause.
local function repeated(c, id, text, want)
  if want.idem == '' then return nil end
  local known = server.call('HMGET', dedup_key(c, id, want.idem), 'reply', 'epoch')
  if not known[1] then return nil end
  local readable, answer = pcall(cmsgpack.unpack, known[1])
  if not readable or type(answer) ~= 'table' then return nil end
  if known[2] ~= fence.parse(text).epoch then
    return reply.err('invalid_input', 'idempotency_key: suspend_idempotency_key_reused')
  end
  return answer
end

local function remember(c, id, want, rec, answer)
  if want.idem == '' then return answer end
  local ttl = DEDUP_MAX_MS
  if want.timeout_at then
    ttl = math.min(math.max(want.timeout_at - c.now, 0) + DEDUP_TAIL_MS, DEDUP_MAX_MS)
  end
  local key = dedup_key(c, id, want.idem)
  server.call('HSET', key, 'reply', cmsgpack.pack(answer), 'epoch', record.epoch(rec))
  server.call('PEXPIRE', key, ttl)
  return answer
end

-- The pending waitpoint to be used, or the error.
local function pending(c, id, rec, binding)
  local found = suspension.read_hash(suspension.waitpoint(c, binding.id))
  if not found then return nil, reply.err('waitpoint_not_found') end
  if found.state ~= 'pending' then return nil, reply.err('waitpoint_not_pending') end
  if found.execution_id ~= id
      or tonumber(found.attempt_index) ~= record.attempt_index(rec) then
    return nil, reply.err('invalid_waitpoint_for_execution')
  end
  if tonumber(found.expires_at) <= c.now then return nil, reply.err('pending_waitpoint_expired') end
  if not found.waitpoint_token then return nil, reply.err('waitpoint_not_token_bound') end
  return found
end

-- Ids, keys and tokens of all bindings, checked and minted before anything is written.
local function bindings(c, id, rec, want)
  local bound = {}
  for i, given in ipairs(want.waitpoints) do
    local binding = { kind = given[1], id = given[2], key = given[3] }
    if binding.kind == 'pending' then
      if #want.waitpoints > 1 then return nil, reply.err('use_pending_with_extras_unsupported') end
      local found, problem = pending(c, id, rec, binding)
      if problem then return nil, problem end
      binding.key, binding.token, binding.record = found.waitpoint_key, found.waitpoint_token, found
    else
      local state = server.call('HGET', suspension.waitpoint(c, binding.id), 'state')
      if state == 'pending' or state == 'active' then
        return nil, reply.err('waitpoint_already_exists')
      end
      local token, problem = tokens.mint(c, binding.id, binding.key, c.now)
      if problem then return nil, problem end
      binding.token = token
    end
    bound[i] = binding
  end
  return bound
end

-- The suspension timeout: given, else from the execution's policy.
local function timeout(c, id, want)
  if want.timeout_at then return want.timeout_at, want.timeout_behavior end
  local text = server.call('GET', K.policy(c.tag, id))
  local defaults = text and cjson.decode(text).suspension_policy
  if not defaults or not defaults.default_timeout_ms then return nil, want.timeout_behavior end
  return c.now + defaults.default_timeout_ms,
    want.behavior_given and want.timeout_behavior or defaults.timeout_behavior or 'fail'
end

local function details(outcome, suspension_id, bound)
  local answer = reply.ok(outcome, suspension_id)
  for _, binding in ipairs(bound) do
    answer[#answer + 1] = binding.id
    answer[#answer + 1] = binding.key
    answer[#answer + 1] = binding.token
  end
  return answer
end

-- Judges what a pending waitpoint has buffered, in the order it was accepted.
local function buffered(c, binding, condition)
  local marks, seen, satisfiers = {}, {}, {}
  for _, signal_id in ipairs(server.call('LRANGE',
      suspension.waitpoint(c, binding.id) .. ':signals', 0, -1)) do
    local signal = signals.recall(c, signal_id, binding.key)
    local added = false
    for _, mark in ipairs(signal and conditions.marks(condition, signal) or {}) do
      if not seen[mark] then
        seen[mark], added = true, true
        marks[#marks + 1] = mark
      end
    end
    if added then satisfiers[#satisfiers + 1] = signal_id end
    if added and conditions.satisfied(condition, marks) then return true, marks, satisfiers end
  end
  return false, marks, satisfiers
end

local function already_satisfied(c, id, rec, want, binding, satisfiers)
  suspension.close_waitpoint(c, binding.id, 'resumed', 'satisfied', true)
  c:zrem(K.index(c.tag, 'pending_waitpoint_expiry'), binding.id)
  c:flush()
  server.call('HSET', suspension.met_key(c, id), 'epoch', record.epoch(rec),
    'suspension_id', want.suspension_id, 'signals', table.concat(satisfiers, ','))
  return remember(c, id, want, rec, details('already_satisfied', want.suspension_id, { binding }))
end

local function write_waitpoint(c, id, rec, want, binding, timeout_at)
  local key = suspension.waitpoint(c, binding.id)
  if binding.record then
    server.call('HSET', key, 'state', 'active', 'activated_at', c.now,
      'suspension_id', want.suspension_id)
    c:zrem(K.index(c.tag, 'pending_waitpoint_expiry'), binding.id)
  else
    server.call('DEL', key)
    server.call('HSET', key, 'execution_id', id, 'attempt_index', record.attempt_index(rec),
      'suspension_id', want.suspension_id, 'waitpoint_key', binding.key,
      'waitpoint_token', binding.token, 'state', 'active', 'created_at', c.now,
      'activated_at', c.now)
  end
  if timeout_at then server.call('HSET', key, 'expires_at', timeout_at) end
  server.call('SADD', suspension.waitpoints_key(c, id), binding.id)
end

local function write_suspension(c, id, rec, want, bound, timeout_at, behavior)
  local ids = {}
  for i, binding in ipairs(bound) do ids[i] = binding.id end
  local key = suspension.key(c, id)
  server.call('DEL', key, suspension.marks_key(c, id), suspension.satisfiers_key(c, id))
  local args = {
    'HSET', key, 'suspension_id', want.suspension_id, 'attempt_index', record.attempt_index(rec),
    'waitpoints', table.concat(ids, ','), 'waitpoint_key', bound[1].key,
    'reason_code', want.reason_code, 'requested_by', want.requested_by, 'created_at', c.now,
    'resume_condition_json', want.condition, 'resume_policy_json', want.policy,
    'timeout_behavior', behavior,
  }
  if timeout_at then
    args[#args + 1] = 'timeout_at'
    args[#args + 1] = timeout_at
  end
  if want.pointer ~= '' then
    args[#args + 1] = 'continuation_metadata_pointer'
    args[#args + 1] = want.pointer
  end
  server.call(unpack(args))
end

local function keep_progress(c, id, marks, satisfiers)
  if #marks == 0 then return end
  server.call('SADD', suspension.marks_key(c, id), unpack(marks))
  server.call('RPUSH', suspension.satisfiers_key(c, id), unpack(satisfiers))
end

local function refusal(c, id, rec, text, want)
  local given = fence.parse(text)
  local index = given.index
  given = given.lease_id .. '/' .. given.epoch .. '/' .. given.attempt_id .. '/'
  local problem = fence.check(c, id, rec, given, false, true)
  if problem then return problem end
  if index ~= '' and tonumber(index) ~= record.attempt_index(rec) then
    return reply.err('invalid_lease_for_suspend')
  end
  if suspension.open(c, id) then return reply.err('already_suspended') end
  for i = 2, #want.waitpoints do
    if want.waitpoints[i][2] == '' or want.waitpoints[i][3] == '' then
      return reply.err('additional_waitpoint_binding_malformed')
    end
  end
end

server.register_function('ff_suspend', function(keys, args)
  local c = Context.open(keys[1])
  local id, text, want = args[1], args[2], cmsgpack.unpack(args[3])
  local before = repeated(c, id, text, want)
  if before then return before end
  local rec = record.read(c, id)
  if not rec then return reply.err('execution_not_found') end
  local problem = refusal(c, id, rec, text, want)
  if problem then return problem end
  local bound
  bound, problem = bindings(c, id, rec, want)
  if problem then return problem end
  local condition = cjson.decode(want.condition)
  local marks, satisfiers = {}, {}
  if bound[1].record then
    for _, key in ipairs(want.referenced) do
      if key ~= bound[1].key then
        return reply.err('invalid_input',
          'resume_condition: referenced_waitpoint_key_missing_binding: ' .. key)
      end
    end
    local satisfied
    satisfied, marks, satisfiers = buffered(c, bound[1], condition)
    if satisfied then return already_satisfied(c, id, rec, want, bound[1], satisfiers) end
  end

  local timeout_at, behavior = timeout(c, id, want)
  want.timeout_at = timeout_at
  pausing.release(c, id, rec, suspension.state(want.reason_code), 'suspend', {
    current_suspension_id = want.suspension_id, current_waitpoint_id = bound[1].id,
    blocking_detail = 'suspended: waitpoint ' .. bound[1].id .. ' awaiting ' .. want.reason_code,
  }, suspension.score(timeout_at))
  write_suspension(c, id, rec, want, bound, timeout_at, behavior)
  for _, binding in ipairs(bound) do write_waitpoint(c, id, rec, want, binding, timeout_at) end
  keep_progress(c, id, marks, satisfiers)
  if timeout_at then c:zadd(K.index(c.tag, 'suspension_timeout'), timeout_at, id) end
  c:flush()
  return remember(c, id, want, rec, details('suspended', want.suspension_id, bound))
end)
