-- Entering and leaving the one index that holds an execution without a lease.

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
  else
    c:zrem(K.lane(c.tag, rec.lane_id, suffix), id)
  end
end
