-- Entering and leaving the one index that holds an execution without a lease.

-- How many different requirements the claimable executions of a lane may have in a partition: a
-- claim looks at each of them.
waiting.MAX_SIGNATURES = 128

-- The error of one signature too many, or nil.
function waiting.signature_excess(c, lane, signature)
  local key = K.lane(c.tag, lane, 'sigs')
  if server.call('SISMEMBER', key, signature) == 1 then return nil end
  local most = waiting.MAX_SIGNATURES
  if server.call('SCARD', key) >= most then
    return reply.err('signature_limit_exceeded', string.format('%d', most))
  end
  if c.joined then
    -- At once, so that the next of a batch counts it.
    server.call('SADD', key, signature)
    c:release_signature(lane, signature)
  end
end

-- The signatures of a lane. Executions that became claimable later may bring in too many: then
-- every look sees some of them.
function waiting.signatures(key)
  local most = waiting.MAX_SIGNATURES
  if server.call('SCARD', key) <= most then return server.call('SMEMBERS', key) end
  return server.call('SRANDMEMBER', key, most)
end

-- Puts a record without a lease where its state says it belongs; `score` is for those
-- whose place the record alone does not tell.
function waiting.enter(c, id, rec, score)
  local suffix = S.index_suffix(rec.state)
  score = score or c.now
  if suffix == 'eligible' then
    local signature = rec.required_capabilities
    if signature then c:sadd(K.lane(c.tag, rec.lane_id, 'sigs'), signature) end
    c:zadd(K.eligible(c.tag, rec.lane_id, signature), c:score(rec), id)
    return
  elseif suffix == 'delayed' then
    score = tonumber(rec.delay_until)
  elseif suffix == 'blocked:dependencies' then
    score = tonumber(rec.created_at)
  end
  c:zadd(K.lane(c.tag, rec.lane_id, suffix), score, id)
end

-- Takes a runnable or suspended record out of its index.
function waiting.leave(c, id, rec)
  local suffix = S.index_suffix(rec.state)
  if suffix == 'eligible' then
    c:zrem(K.eligible(c.tag, rec.lane_id, rec.required_capabilities), id)
    c:release_signature(rec.lane_id, rec.required_capabilities)
  else
    c:zrem(K.lane(c.tag, rec.lane_id, suffix), id)
  end
end
