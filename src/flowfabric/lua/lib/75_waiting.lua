-- The one index that holds an execution without a lease.

-- Sets of requirements that submitters may choose, and signatures that a call sees, per lane and
-- partition.
local MAX_SIGNATURES, MAX_SEEN = 128, 256

local function escaped(char) return string.format('%%%02X', string.byte(char)) end

-- What a worker offers for a task that it has a handler for; core/capabilities.py builds the same.
waiting.task_token = values.memo(function(kind)
  return 'task:' .. string.gsub(kind, '[^!-$&-+--~]', escaped)
end)

-- The task that a signature names, or nil. It comes last.
function waiting.task_in(signature) return string.match(',' .. signature, '[, ](task:[^,]*)$') end

-- What the signatures of a namespace begin with; those of `default` have no mark.
waiting.namespace_prefix = values.memo(function(namespace)
  return namespace == 'default' and '' or namespace .. ' '
end)

-- The namespace of a signature and what else it names, as CSV.
function waiting.parts(signature)
  local namespace, required = string.match(signature, '^(%S+) (.*)$')
  return namespace or 'default', required or signature
end

-- What a worker must offer for the execution, as CSV, or nil. One that was offered to a worker
-- without its task waits for workers that have it.
function waiting.required(rec)
  local required = rec.required_capabilities
  if not rec.offered_to then return required end
  local task = waiting.task_token(rec.execution_kind)
  return required and required .. ',' .. task or task
end

-- By which namespace and requirements the execution is indexed, or nil for the plain index.
function waiting.signature(rec)
  local required, namespace = waiting.required(rec), rec.namespace
  if not namespace or namespace == 'default' then return required end
  return waiting.namespace_prefix(namespace) .. (required or '')
end

-- Whether submitters chose this set of requirements.
local function is_chosen(signature)
  local _, required = waiting.parts(signature)
  return required ~= '' and not waiting.task_in(signature)
end

-- Whether submitters chose as many signatures as they may; those of tasks and namespaces alone do not
-- count.
local function is_full(key)
  if server.call('SCARD', key) < MAX_SIGNATURES then return false end
  local chosen = 0
  for _, signature in ipairs(server.call('SRANDMEMBER', key, MAX_SEEN)) do
    if is_chosen(signature) then chosen = chosen + 1 end
  end
  return chosen >= MAX_SIGNATURES
end

-- The error if a lane has as many sets of requirements as it may, or nil.
function waiting.signature_excess(c, lane, required, namespace)
  local key = K.lane(c.tag, lane, 'sigs')
  local signature = waiting.namespace_prefix(namespace or 'default') .. required
  if server.call('SISMEMBER', key, signature) == 1 then return nil end
  if is_full(key) then
    return reply.err('signature_limit_exceeded', values.text(MAX_SIGNATURES))
  end
  if c.joined then
    -- At once, so that the next item of the batch counts it.
    server.call('SADD', key, signature)
    c:release_signature(lane, signature)
  end
end

-- Tasks, namespaces and executions that become claimable later may exceed that limit. Each call then
-- sees a random part, and those of `own` that are in use.
function waiting.signatures(key, own)
  if server.call('SCARD', key) <= MAX_SEEN then return server.call('SMEMBERS', key) end
  local found, seen = server.call('SRANDMEMBER', key, MAX_SEEN), {}
  for _, signature in ipairs(found) do seen[signature] = true end
  for first, last in values.pieces(own or {}) do
    for i, used in ipairs(server.call('SMISMEMBER', key, unpack(own, first, last))) do
      local signature = own[first + i - 1]
      if used == 1 and not seen[signature] then found[#found + 1] = signature end
    end
  end
  return found
end

-- Adds a claimable execution where only workers look that have what it requires.
function waiting.offer(c, id, rec, key_of)
  local signature = waiting.signature(rec)
  if signature then c:sadd(K.lane(c.tag, rec.lane_id, 'sigs'), signature) end
  c:zadd(key_of(c.tag, rec.lane_id, signature), c:score(rec), id)
end

-- Wakes a worker for an execution that can be claimed. A call that also claims rings later, for what
-- it leaves; for work that it may not take it rings at once.
function waiting.ring(c, rec)
  local later = c.rings_later
  if later and not offers.takes(c.claimer, rec) then c.rings_later = nil end
  c:ring(rec.lane_id, waiting.signature(rec))
  c.rings_later = later
end

-- Rings for all claimable work of a lane; whether there is any.
function waiting.ring_all(c, lane)
  if not c:holds_work(lane) then return false end
  if server.call('EXISTS', K.eligible(c.tag, lane), K.reclaimable(c.tag, lane)) > 0 then
    c:ring(lane)
  end
  for _, signature in ipairs(waiting.signatures(K.lane(c.tag, lane, 'sigs'))) do
    c:ring(lane, signature)
  end
  return true
end

-- Adds a record without a lease to the index of its state. `score`: if it is not on the record.
function waiting.enter(c, id, rec, score)
  local suffix = S.index_suffix(rec.state)
  if suffix == 'eligible' then return waiting.offer(c, id, rec, K.eligible) end
  if suffix == 'delayed' then
    score = tonumber(rec.delay_until)
  elseif suffix == 'blocked:dependencies' then
    score = tonumber(rec.created_at)
  end
  c:zadd(K.lane(c.tag, rec.lane_id, suffix), score or c.now, id)
end

function waiting.leave(c, id, rec)
  lease.drop_grant(c, id, rec)
  local suffix = S.index_suffix(rec.state)
  if suffix == 'eligible' then
    local signature = waiting.signature(rec)
    c:zrem(K.eligible(c.tag, rec.lane_id, signature), id)
    c:release_signature(rec.lane_id, signature)
  else
    c:zrem(K.lane(c.tag, rec.lane_id, suffix), id)
  end
end
