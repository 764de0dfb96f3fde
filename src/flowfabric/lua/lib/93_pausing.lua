-- Giving a lease back while the same attempt stays open.

-- Releases the lease and parks the record in `state`; the attempt resumes later.
-- `score` places a suspended one in its lane's index.
function pausing.release(c, id, rec, state, marker, fields, score)
  local timer = rec.attempt_timeout_ms
    and server.call('ZSCORE', K.index(c.tag, 'attempt_timeout'), id)
  lease.leave_indexes(c, id, rec)
  local told = { 'paused', marker, 'suspended_at', c.now, 'last_transition_at', c.now }
  if timer then
    fields.attempt_timeout_remaining_ms = math.max(1, tonumber(timer) - c.now)
  end
  for name, value in pairs(fields) do
    told[#told + 1] = name
    told[#told + 1] = value
  end
  record.transition(c, id, rec, state, unpack(told))
  local reason = string.match(marker, '^[^:]+')
  if fields.delay_until then
    events.emit_lease(c, 'released', id, rec, 'r', reason, 'du', fields.delay_until)
  elseif fields.current_suspension_id then
    events.emit_lease(c, 'released', id, rec, 'r', reason, 'su', fields.current_suspension_id)
  else
    events.emit_lease(c, 'released', id, rec, 'r', reason)
  end
  waiting.enter(c, id, rec, score)
end

-- The answer an earlier, identical call got, when its reply was lost.
function pausing.replayed(c, id, rec, text, marker)
  local own = fence.own_attempt(c, id, rec, text)
  if own and own.paused then return string.match(own.paused, '^' .. marker .. ':(.+)$') end
end
