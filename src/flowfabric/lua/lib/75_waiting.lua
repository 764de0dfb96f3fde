-- The one index that holds an execution without a lease.

-- Signatures per lane and partition: a claim looks at each of them.
local MAX_SIGNATURES = 128

function waiting.signature_excess(c, lane, signature)
  local key = K.lane(c.tag, lane, 'sigs')
  if server.call('SISMEMBER', key, signature) == 1 then return nil end
  if server.call('SCARD', key) >= MAX_SIGNATURES then
    return reply.err('signature_limit_exceeded', values.text(MAX_SIGNATURES))
  end
  if c.joined then
    -- At once, so that the next item of the batch counts it.
    server.call('SADD', key, signature)
    c:release_signature(lane, signature)
  end
end

-- Executions that become claimable later may exceed the limit: then each call sees a random part.
function waiting.signatures(key)
  if server.call('SCARD', key) <= MAX_SIGNATURES then return server.call('SMEMBERS', key) end
  return server.call('SRANDMEMBER', key, MAX_SIGNATURES)
end

-- Adds a claimable execution where only workers look that have what it requires.
function waiting.offer(c, id, rec, key_of)
  local signature = rec.required_capabilities
  if signature then c:sadd(K.lane(c.tag, rec.lane_id, 'sigs'), signature) end
  c:zadd(key_of(c.tag, rec.lane_id, signature), c:score(rec), id)
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
    c:zrem(K.eligible(c.tag, rec.lane_id, rec.required_capabilities), id)
    c:release_signature(rec.lane_id, rec.required_capabilities)
  else
    c:zrem(K.lane(c.tag, rec.lane_id, suffix), id)
  end
end
