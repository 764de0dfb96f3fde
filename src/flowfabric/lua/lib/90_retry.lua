-- How an attempt fails: whether and when it is retried, and the transition itself.

local NEVER = {
  permanent = true, cancelled = true, budget_exceeded = true, step_kind_mismatch = true,
  extractor_payload_decode = true,
}
local BACKOFF_NUMBERS = { 'delay_ms', 'initial_delay_ms', 'multiplier', 'max_delay_ms' }

local function part(holder, name, wanted)
  if holder[name] == cjson.null then holder[name] = nil end
  assert(holder[name] == nil or type(holder[name]) == wanted)
  return holder[name]
end

local function read(stored)
  local policy = part(stored, 'retry_policy', 'table')
  if not policy then return nil end
  part(policy, 'max_retries', 'number')
  part(policy, 'retryable_categories', 'table')
  local backoff = part(policy, 'backoff', 'table') or {}
  for _, name in ipairs(BACKOFF_NUMBERS) do part(backoff, name, 'number') end
  assert(backoff.type ~= 'fixed' or backoff.delay_ms)
  return policy
end

-- Without a readable policy, a failure is final.
function retry.policy(c, id)
  local ok, policy = pcall(read, (record.policy(c, id)))
  return ok and policy or nil
end

function retry.on_timeout(policy)
  return type(policy) == 'table' and (policy.retry_on_timeout == true
    or values.contains(policy.retryable_categories or {}, 'timeout'))
end

function retry.allowed(c, rec, policy, category)
  if type(policy) ~= 'table' or NEVER[category] then return false end
  if flow.ending_member(c, rec) then return false end
  local categories = policy.retryable_categories or {}
  if #categories > 0 and not values.contains(categories, category) then return false end
  return tonumber(rec.retry_count or 0) < tonumber(policy.max_retries or 3)
end

-- Picks a delay from the upper half of the given one. math.random is the same on every run of a
-- script, so the random number comes from a hash of what is unique to this failure.
local function jittered(delay, seed)
  local low = math.ceil(delay / 2)
  local draw = tonumber(string.sub(server.sha1hex(seed), 1, 8), 16) / 4294967296
  return low + math.floor(draw * (delay - low + 1))
end

local function backoff_ms(policy, n, seed)
  local backoff = policy.backoff or {}
  local delay
  if backoff.type == 'fixed' then
    delay = tonumber(backoff.delay_ms)
  else
    delay = tonumber(backoff.initial_delay_ms or 1000)
    -- 0 times infinity is NaN.
    if delay > 0 then delay = delay * tonumber(backoff.multiplier or 2) ^ n end
    delay = math.min(delay, tonumber(backoff.max_delay_ms or 60000))
  end
  delay = math.floor(math.min(delay, clock.END))
  if backoff.jitter == true and delay > 0 then return jittered(delay, seed) end
  return delay
end

function retry.schedule(c, id, rec, policy, failure)
  local count = tonumber(rec.retry_count or 0)
  local due = c:after(backoff_ms(policy, count, rec.lease .. c.now))
  local next_index = record.attempt_count(rec)
  record.archive(c, id, rec, 'ended_failure', {
    failure_reason = failure.reason, failure_category = failure.category,
    ended_by = failure.ended_by, delay_until = due, next_attempt_index = next_index,
  })
  streams.close(c, id, rec, failure.stream_reason or 'attempt_failure')
  lease.leave_indexes(c, id, rec)
  record.clear(c, id, rec, 'blocking_detail', 'lease_expired_at', 'lease_revoked_at',
    'lease_revoke_reason')
  local fields = { 'delay_until', due, 'retry_count', count + 1, 'last_transition_at', c.now }
  record.add_or_clear(c, id, rec, fields, 'failure_reason', failure.reason)
  record.add_or_clear(c, id, rec, fields, 'failure_category', failure.category)
  record.transition(c, id, rec, S.delayed('b', 't'), unpack(fields))
  events.emit_lease(c, 'released', id, rec, 'r', 'failed_retry_scheduled', 'du', due)
  waiting.enter(c, id, rec)
  return due, next_index
end

-- Ends an attempt unsuccessfully; `request` names an operator's call, whose policy replaces the
-- stored one. Returns an error, or nil and what was done: `retry_scheduled`, when, the next index; or
-- `terminal_failed`. A repeat returns the same.
function retry.fail(c, id, rec, text, reason, category, request, policy_json)
  local problem = fence.check(c, id, rec, text, request, true)
  if problem then
    local own = fence.own_attempt(c, id, rec, text)
    if not own or own.state ~= 'ended_failure' or own.ended_by ~= 'fail' then return problem end
    if not own.delay_until then return nil, 'terminal_failed' end
    return nil, 'retry_scheduled', own.delay_until, own.next_attempt_index
  end
  local policy = retry.policy(c, id)
  if request and policy_json ~= '' then policy = cjson.decode(policy_json) end
  c.ended = true
  if retry.allowed(c, rec, policy, category) then
    local due, next_index = retry.schedule(c, id, rec, policy,
      { reason = reason, category = category, ended_by = 'fail' })
    local at, next_text = values.text(due), values.text(next_index)
    operator.remember(c, id, rec, request, 'retry_scheduled ' .. at .. ' ' .. next_text)
    return nil, 'retry_scheduled', at, next_text
  end
  local fields = { 'ended_by', 'fail' }
  record.add_or_clear(c, id, rec, fields, 'failure_reason', reason)
  record.add_or_clear(c, id, rec, fields, 'failure_category', category)
  ending.finish(c, id, rec, {
    outcome = 'f', reason = 'failed_terminal', category = category ~= '' and category or nil,
    stream_reason = 'attempt_failure', fields = fields,
    source = request and 'operator_override' or nil,
  })
  operator.remember(c, id, rec, request, 'terminal_failed')
  return nil, 'terminal_failed'
end
