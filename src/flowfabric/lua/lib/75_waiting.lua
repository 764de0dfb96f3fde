-- The one index that holds an execution without a lease.

-- Signatures per lane and partition: a claim looks at each of them.
local MAX_SIGNATURES = 128

local function escaped(char) return string.format('%%%02X', string.byte(char)) end

-- What a worker offers for a task that it has a handler for; core/capabilities.py builds the same.
waiting.task_token = values.memo(function(kind)
  return 'task:' .. string.gsub(kind, '[^!-$&-+--~]', escaped)
end)

-- The task that a signature names, or nil. It comes last.
function waiting.task_in(signature) return string.match(',' .. signature, ',(task:[^,]*)$') end

-- What only workers offer that know the task, if the execution was offered to one that does not.
function waiting.task(rec) return rec.offered_to and waiting.task_token(rec.execution_kind) end

-- Everything that a worker must offer for the execution, as CSV, or nil.
function waiting.signature(rec)
  local required = rec.required_capabilities
  if not rec.offered_to then return required end
  return required and required .. ',' .. waiting.task(rec) or waiting.task(rec)
end

-- Whether submitters chose as many signatures as they may; those with a task do not count.
local function is_full(key)
  if server.call('SCARD', key) < MAX_SIGNATURES then return false end
  local chosen = 0
  for _, signature in ipairs(server.call('SRANDMEMBER', key, 2 * MAX_SIGNATURES)) do
    if not waiting.task_in(signature) then chosen = chosen + 1 end
  end
  return chosen >= MAX_SIGNATURES
end

function waiting.signature_excess(c, lane, signature)
  local key = K.lane(c.tag, lane, 'sigs')
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

-- Executions that become claimable later may exceed the limit: then each call sees a random part,
-- and those of `own` that are in use.
function waiting.signatures(key, own)
  if server.call('SCARD', key) <= MAX_SIGNATURES then return server.call('SMEMBERS', key) end
  local found, seen = server.call('SRANDMEMBER', key, MAX_SIGNATURES), {}
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

-- Wakes a worker for an execution that can be claimed. A call that claims rings for what it leaves;
-- what has requirements may be for others, so it rings at once.
function waiting.ring(c, rec)
  local later = c.rings_later
  if waiting.signature(rec) then c.rings_later = nil end
  c:ring(rec.lane_id, waiting.task(rec))
  c.rings_later = later
end

-- Rings for all claimable work of a lane; whether there is any.
function waiting.ring_all(c, lane)
  if not c:holds_work(lane) then return false end
  local for_any = server.call('EXISTS', K.eligible(c.tag, lane), K.reclaimable(c.tag, lane)) > 0
  for _, signature in ipairs(waiting.signatures(K.lane(c.tag, lane, 'sigs'))) do
    local task = waiting.task_in(signature)
    if task then c:ring(lane, task) else for_any = true end
  end
  if for_any then c:ring(lane) end
  return true
end

-- Adds a record without a lease to the index of its state; `score` if the record does not tell it.
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
