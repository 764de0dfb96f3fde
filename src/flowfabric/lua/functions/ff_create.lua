-- ff_create: accept executions, each at most once per id and per idempotency key.
-- Keys: core, payload, policy, tags, idem, all_executions, lane eligible / delayed, execution_deadline.
-- Arguments: common options (msgpack map or empty), then per item: execution_id, kind, payload,
--   payload encoding, options (msgpack map or empty; they win over the common ones).
--   Options: ns, lane, prio, creator, idem, digest, tags (flat list), policy (JSON), delay,
--   delay_in (ms from now), deadline.
-- Replies per item: public_state | [1, DUPLICATE, id] | [0, code, detail...].
-- Errors: lane_not_accepting, invalid_policy_json, invalid_capabilities, signature_limit_exceeded,
--   execution_being_deleted, unavailable, idempotency_conflict (key, id); of the whole call: batch_too_large. Events: none.
local MAX_PRIORITY = 9000
local DEFAULT_DEDUP_MS = 86400000
local NONE = {}

-- Policies may carry any u64.
local function bounded(value) return value and math.min(value, clock.END) end

local function positive(value)
  if value and value > 0 then return bounded(value) end
end

-- The sorted CSV of a list of capabilities, nil for none, or nil and what is wrong with it. Callers
-- validate policies first; this is the last line of defence.
local function capabilities_csv(tokens)
  if tokens == nil then return nil end
  if type(tokens) ~= 'table' then return nil, 'not_array' end
  local seen, list = {}, {}
  for key, token in pairs(tokens) do
    if type(key) ~= 'number' then return nil, 'not_array' end
    if type(token) ~= 'string' then return nil, 'non_string_token' end
    if token == '' then return nil, 'empty_token' end
    if string.find(token, ',', 1, true) then return nil, 'comma_in_token' end
    if string.find(token, '[%z\1-\32\127]') then return nil, 'control_or_whitespace' end
    if string.find(token, '^task:') then return nil, 'reserved prefix' end
    if not seen[token] then list[#list + 1] = token end
    seen[token] = true
  end
  if #list == 0 then return nil end
  table.sort(list)
  local csv = table.concat(list, ',')
  return csv, granting.capability_excess(csv)
end

local function required_signature(policy)
  local routing = policy.routing_requirements
  if routing == nil then return nil end
  if type(routing) ~= 'table' then
    return nil, reply.err('invalid_policy_json', 'routing_requirements:not_object')
  end
  local csv, problem = capabilities_csv(routing.required_capabilities)
  if problem then return nil, reply.err('invalid_capabilities', 'required:' .. problem) end
  return csv
end

local function typed(value, wanted)
  assert(value == nil or type(value) == wanted)
  return value
end

local function unenforced(policy)
  if #(typed(policy.budget_ids, 'table') or NONE) > 0 then
    return reply.err('unavailable', 'budget_ids: budgets are not enforced yet; submit without them')
  end
  if typed(policy.quota_policy_id, 'string') then
    return reply.err('unavailable', 'quota_policy_id: quotas are not enforced yet; submit without it')
  end
end

local function extract(policy)
  local signature, problem = required_signature(policy)
  local timeouts = typed(policy.timeout_policy, 'table') or NONE
  local stream = typed(policy.stream_policy, 'table') or NONE
  return {
    error = problem or unenforced(policy),
    priority = typed(policy.priority, 'number'),
    delay = typed(policy.delay_until, 'number'),
    dedup = typed(policy.dedup_window_ms, 'number'),
    deadline_in = positive(typed(timeouts.execution_deadline_ms, 'number')),
    fields = {
      required_capabilities = signature,
      attempt_timeout_ms = positive(typed(timeouts.attempt_timeout_ms, 'number')),
      max_reclaim_count = typed(policy.max_reclaim_count, 'number'),
      retention_ms = bounded(typed(stream.retention_ttl_ms, 'number')),
      stream_maxlen = typed(stream.retention_maxlen, 'number'),
    },
  }
end

-- What the record needs of a policy. The wrong type is refused here: an error later would stop a
-- batch half-way.
local function digest(text)
  local ok, policy = pcall(cjson.decode, text)
  if ok and (type(policy) ~= 'table' or #policy > 0) then
    return { error = reply.err('invalid_policy_json', 'not_object') }
  end
  local readable, found = pcall(extract, policy)
  return ok and readable and found or { error = reply.err('invalid_policy_json', 'malformed') }
end
-- Most executions share a policy with others; a long one is not worth its memory.
local KEPT_BYTES = 4096
local kept_digest = values.memo(digest)

local function options(common, packed)
  if packed == '' then return common end
  return setmetatable(cmsgpack.unpack(packed), { __index = common })
end

local UUID_BYTES = 36

-- The id that an idempotency key stands for, or nil. Its entry is the id, then the digest as hex.
local function keyed(c, namespace, idem, given)
  local entry = server.call('GET', K.idem(c.tag, namespace, idem))
  if not entry then return nil end
  local size = #c.tag + 1 + UUID_BYTES
  local stored, known = string.sub(entry, 1, size), string.sub(entry, size + 1)
  if server.call('EXISTS', K.core(c.tag, stored)) == 0 then return nil end
  if given and known ~= '' and given ~= known then
    reply.refuse('idempotency_conflict', idem, stored)
  end
  return stored
end

-- The id that this submission already has, or nil.
local function existing(c, id, lane, namespace, opts)
  local stored = opts.idem and keyed(c, namespace, opts.idem, opts.digest)
  if stored then return stored end
  -- Usually none of these exists, and one command tells it.
  local core, backlog = K.core(c.tag, id), K.index(c.tag, 'purge_backlog')
  if c.lanes[lane] then
    if server.call('EXISTS', core, backlog) == 0 then return nil end
  elseif server.call('EXISTS', core, backlog, K.lane(c.tag, lane, 'config')) == 0 then
    c.lanes[lane] = Context.DEFAULTS
    return nil
  end
  if server.call('EXISTS', core) == 1 then return id end
  reply.stop_with(purging.finish_problem(c, id))
end

local plain_fields = values.memo(function(encoding)
  return encoding ~= '' and { 'payload_encoding', encoding } or NONE
end)

local function specify(c, rec, lane, namespace, encoding, opts, policy)
  local fields = { unpack(plain_fields(encoding)) }
  local function set(name, value)
    rec[name] = value
    values.add(fields, name, value)
  end
  if lane ~= 'default' then set('lane_id', lane) end
  if namespace ~= 'default' then set('namespace', namespace) end
  set('creator_identity', opts.creator)
  for name, value in pairs(policy.fields or NONE) do set(name, value) end
  local priority = math.max(0, math.min(MAX_PRIORITY, tonumber(opts.prio or policy.priority or 0)))
  if priority ~= 0 then set('priority', priority) end
  if opts.tags then set('tagged', values.bytes(opts.tags, 1)) end
  local after = opts.delay_in and c:after(opts.delay_in)
  local delay = math.min(tonumber(opts.delay or after or policy.delay or 0), clock.END)
  if delay > c.now then
    rec.state = S.delayed('d', 'f')
    set('delay_until', delay)
  end
  set('execution_deadline_at', opts.deadline
    or (policy.deadline_in and c:after(policy.deadline_in)) or nil)
  return fields
end

local function create(c, id, kind, payload, encoding, opts)
  local namespace, lane = opts.ns or 'default', opts.lane or 'default'
  local found = existing(c, id, lane, namespace, opts)
  if found then return reply.duplicate(found) end
  local accepting = c:lane(lane).state
  if accepting == 'draining' or accepting == 'disabled' then
    return reply.err('lane_not_accepting', accepting)
  end
  local policy = opts.policy and (#opts.policy > KEPT_BYTES and digest(opts.policy)
    or kept_digest(opts.policy)) or NONE
  local signature = policy.fields and policy.fields.required_capabilities
  reply.stop_with(policy.error or (signature and waiting.signature_excess(c, lane, signature)))

  local rec = { state = S.NEW, lane_id = lane, created_at = values.text(c.now) }
  local fields = plain_fields(encoding)
  if opts ~= NONE then fields = specify(c, rec, lane, namespace, encoding, opts, policy) end
  server.call('HSET', K.core(c.tag, id), 'state', rec.state, 'execution_kind', kind,
    'created_at', rec.created_at, unpack(fields))
  if payload ~= '' then server.call('SET', K.payload(c.tag, id), payload) end
  if opts.policy then server.call('SET', K.policy(c.tag, id), opts.policy) end
  if opts.tags then server.call('HSET', K.tags(c.tag, id), unpack(opts.tags)) end
  c:zadd(K.index(c.tag, 'all_executions'), '0', id)
  waiting.enter(c, id, rec)
  if rec.execution_deadline_at then
    c:zadd(K.index(c.tag, 'execution_deadline'), rec.execution_deadline_at, id)
  end
  if opts.idem then
    local window = math.min(tonumber(policy.dedup or DEFAULT_DEDUP_MS), clock.END - c.now)
    local key, entry = K.idem(c.tag, namespace, opts.idem), id .. (opts.digest or '')
    if window > 0 then server.call('SET', key, entry, 'PX', window) end
  end
  if S.is_eligible(rec.state) then c:ring(lane) end
  return S.public(rec.state)
end

register('ff_create', function(keys, args)
  local problem = batch.excess(args, (#args - 1) / 5)
  if problem then return problem end
  local c = Context.open(keys[1], #args > 6)
  local common = args[1] ~= '' and cmsgpack.unpack(args[1]) or NONE
  local replies = {}
  for i = 2, #args, 5 do
    replies[#replies + 1] =
      reply.guarded(create, c, args[i], args[i + 1], args[i + 2], args[i + 3],
        options(common, args[i + 4]))
  end
  c:flush()
  return reply.ok(replies)
end, {})
