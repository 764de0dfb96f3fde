-- Accepting new executions.

local MAX_PRIORITY = 9000
local DEFAULT_DEDUP_MS = 86400000
local NONE = {}
creating.NONE = NONE

-- Policies may carry any u64.
local function bounded(value) return value and math.min(value, clock.END) end

local function positive(value)
  if value and value > 0 then return bounded(value) end
end

-- The sorted CSV of a list of capabilities, nil for none, or nil and the problem. Callers validate
-- policies first, but this protects the indexes.
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

local function extract(policy)
  local signature, problem = required_signature(policy)
  local timeouts = typed(policy.timeout_policy, 'table') or NONE
  local stream = typed(policy.stream_policy, 'table') or NONE
  local budgets, quota_policy, misattached = admission.attached(policy)
  return {
    error = problem or misattached,
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
      budget_ids = budgets,
      quota_policy_id = quota_policy,
    },
  }
end

-- What the record needs of a policy. A wrong type is an error here, because a later error would stop
-- a batch half-way.
local function digest(text)
  local ok, policy = pcall(cjson.decode, text)
  if ok and (type(policy) ~= 'table' or #policy > 0) then
    return { error = reply.err('invalid_policy_json', 'not_object') }
  end
  local readable, found = pcall(extract, policy)
  return ok and readable and found or { error = reply.err('invalid_policy_json', 'malformed') }
end
-- Cached, because most executions share a policy; a long one is not worth the memory.
local KEPT_BYTES = 4096
local kept_digest = values.memo(digest)

function creating.options(common, packed)
  if packed == '' then return common end
  return setmetatable(cmsgpack.unpack(packed), { __index = common })
end

local UUID_BYTES = 36

-- The id that belongs to an idempotency key, or nil. The entry is the id, then the digest as hex.
function creating.keyed(c, namespace, idem, given)
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

-- Ends the call if the lane's number of partitions is not the one that the submitter assumed: a
-- repeat would look for the key in another partition.
local function check_placement(c, lane, view)
  local shards = server.call('HGET', K.lane(c.tag, lane, 'placed'), 'spread_over') or '1'
  if shards ~= view then reply.refuse('lane_placement_changed', lane, shards) end
end

-- The id that this submission already has, or nil.
local function existing(c, id, lane, namespace, opts)
  if opts.idem then
    local stored = creating.keyed(c, namespace, opts.idem, opts.digest)
    if stored then return stored end
    if opts.view then check_placement(c, lane, opts.view) end
  end
  if opts.is_new then return nil end
  -- Usually none of these exists, which one command can check.
  local core, backlog = K.core(c.tag, id), K.index(c.tag, 'purge_backlog')
  if c.lanes[lane] then
    if server.call('EXISTS', core, backlog) == 0 then return nil end
  elseif server.call('EXISTS', core, backlog, K.lane(c.tag, lane, 'config')) == 0 then
    c.lanes[lane] = Context.DEFAULTS
    return nil
  end
  if server.call('EXISTS', core) == 1 then
    -- The error does not name the execution: the caller may not see its namespace.
    if (server.call('HGET', core, 'namespace') or 'default') ~= namespace then
      reply.refuse('invalid_input', 'execution_id: exists in another namespace')
    end
    return id
  end
  reply.stop_with(purging.finish_problem(c, id))
end

-- Whether none of these ids is in use, in one command.
function creating.are_new(c, ids)
  local cores = {}
  for i, id in ipairs(ids) do cores[i] = K.core(c.tag, id) end
  return server.call('EXISTS', K.index(c.tag, 'purge_backlog'), unpack(cores)) == 0
end

local plain_fields = values.memo(function(encoding)
  return encoding ~= '' and { 'payload_encoding', encoding } or NONE
end)

-- A member with dependencies waits for them first, then for the release of its flow.
local function specify_member(c, rec, opts, set)
  local deps, f = opts.deps or NONE, flow.read(c, opts.flow)
  set('flow_id', opts.flow)
  set('node', opts.node)
  set('join', opts.join)
  set('out', opts.out and '1')
  local rank = graph.rank(c, deps, opts.floor)
  if rank ~= 0 then set('rank', values.text(rank)) end
  if #deps > 0 then
    rec.state = S.waiting_children('f')
    set('deps', values.text(opts.inbound or #deps) .. ' 0 0 0 p')
    set('named', opts.named and '1')
  elseif f.held_from then
    rec.state = S.held('f')
    set('blocking_detail', 'flow held')
  elseif subflows.is_node(rec) and S.is_eligible(rec.state) then
    local why
    rec.state, why = subflows.state(rec, 'f')
    set('blocking_detail', why)
    set('subflow_open', '1')
  end
  if subflows.is_node(rec) and not f.subflows then flow.set(c, opts.flow, 'subflows', '1') end
end

local function specify(c, rec, lane, namespace, encoding, opts, policy)
  local fields = { unpack(plain_fields(encoding)) }
  local function set(name, value)
    if not value or value == '' then return end
    rec[name] = value
    fields[#fields + 1] = name
    fields[#fields + 1] = value
  end
  if lane ~= 'default' then set('lane_id', lane) end
  if namespace ~= 'default' then set('namespace', namespace) end
  set('creator_identity', opts.creator)
  for name, value in pairs(policy.fields or NONE) do set(name, value) end
  local asked = opts.prio or policy.priority
  if asked then
    local priority = math.max(0, math.min(MAX_PRIORITY, tonumber(asked)))
    if priority ~= 0 then set('priority', priority) end
  end
  if opts.tags then set('tagged', values.bytes(opts.tags, 1)) end
  local delay = opts.delay or opts.delay_in and c:after(opts.delay_in) or policy.delay
  if delay and tonumber(delay) > c.now then
    rec.state = S.delayed('d', 'f')
    set('delay_until', math.min(tonumber(delay), clock.END))
  end
  set('execution_deadline_at', opts.deadline
    or (policy.deadline_in and c:after(policy.deadline_in)) or nil)
  if opts.flow then specify_member(c, rec, opts, set) end
  return fields
end

-- The live flow that a new member joins; ends the call if it cannot.
local function flow_of(c, namespace, opts)
  local f = flow.live(c, opts.flow, opts.checked)
  if f.namespace ~= namespace then
    reply.refuse('invalid_input', 'namespace: the flow is in ' .. f.namespace)
  end
  if not opts.checked then
    reply.stop_with(graph.edges_problem(c, opts.flow, opts.deps or NONE))
  end
  return f
end

local function join_flow(c, f, id, rec, opts)
  local flow_id, ended = opts.flow, {}
  c.inbound = c.inbound or {}
  c.inbound[id] = 0
  graph.add_member(c, flow_id, f, id, rec)
  if S.is_held(rec.state) then server.call('RPUSH', K.held(c.tag, flow_id), id) end
  for _, each in ipairs(opts.deps or NONE) do
    local e, up, place = graph.add_edge(c, flow_id, f, id, each, 'u')
    if S.is_terminal(up.state) then ended[#ended + 1] = { place, e.upstream } end
  end
  for _, each in ipairs(ended) do graph.resolve_ended(c, flow_id, each[1], id, each[2]) end
  if #ended > 0 then record.reload_state(c, id, rec) end
end

-- The digest of the policy; ends the call if the lane or the policy is refused.
local function accepted(c, lane, opts)
  local accepting = c:lane(lane).state
  if accepting == 'draining' or accepting == 'disabled' then
    reply.refuse('lane_not_accepting', accepting)
  end
  local policy = opts.policy and (#opts.policy > KEPT_BYTES and digest(opts.policy)
    or kept_digest(opts.policy)) or NONE
  local required = policy.fields and policy.fields.required_capabilities
  reply.stop_with(policy.error
    or (required and waiting.signature_excess(c, lane, required, opts.ns)))
  return policy
end

-- The error that a new execution would get, or nil; leaves nothing written.
function creating.problem(c, opts)
  local ok, answer = try(accepted, c, opts.lane or 'default', opts)
  if not ok then error(answer, 0) end
  if answer[1] == 0 then return answer end
  opts.accepted = answer
end

-- Accepts one execution; `opts` as in ff_create.
function creating.create(c, id, kind, payload, encoding, opts)
  local namespace, lane = opts.ns or 'default', opts.lane or 'default'
  local found = existing(c, id, lane, namespace, opts)
  if found then return reply.duplicate(found) end
  local policy = opts.accepted or accepted(c, lane, opts)
  local f = opts.flow and flow_of(c, namespace, opts)

  local rec = { state = S.NEW, lane_id = lane, created_at = values.text(c.now), execution_kind = kind }
  local fields = plain_fields(encoding)
  if opts ~= NONE then fields = specify(c, rec, lane, namespace, encoding, opts, policy) end
  if payload == '' then
    server.call('HSET', K.core(c.tag, id), 'state', rec.state, 'execution_kind', kind,
      'created_at', rec.created_at, unpack(fields))
  else
    local small = record.is_small(payload)
    server.call('HSET', K.core(c.tag, id), 'state', rec.state, 'execution_kind', kind, 'created_at',
      rec.created_at, small and 'payload' or 'payload_key', small and payload or '1', unpack(fields))
    if not small then server.call('SET', K.payload(c.tag, id), payload) end
  end
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
  if S.is_eligible(rec.state) then waiting.ring(c, rec) end
  if f then join_flow(c, f, id, rec, opts) end
  return S.public(rec.state)
end
