-- Releasing a lease while the same attempt stays open.

-- Parks the record in `state`; the attempt resumes later. `marker` is `<reason>:<answer>`; `score`
-- places a suspended execution in its lane's index.
function pausing.release(c, id, rec, state, marker, fields, score)
  local timer = rec.attempt_timeout_ms
    and server.call('ZSCORE', K.index(c.tag, 'attempt_timeout'), id)
  lease.leave_indexes(c, id, rec)
  local stored = { 'paused', marker, 'suspended_at', c.now, 'last_transition_at', c.now }
  values.add(stored, 'attempt_timeout_remaining_ms', timer and math.max(1, tonumber(timer) - c.now))
  for name, value in pairs(fields) do values.add(stored, name, value) end
  record.transition(c, id, rec, state, unpack(stored))
  local details = { 'r', string.match(marker, '^[^:]+') }
  values.add(details, 'du', fields.delay_until)
  values.add(details, 'su', fields.current_suspension_id)
  events.emit_lease(c, 'released', id, rec, unpack(details))
  waiting.enter(c, id, rec, score)
end

-- Registers a function with which the lease holder, or an operator, parks an execution: `park(c,
-- id, rec, args)` does it and returns the answer. Arguments 2 and 3 are the fence and the source.
function pausing.register_function(name, reason, park, flags)
  record.register_function(name, record.checked_lease, function(c, id, rec, args)
    local request, answer = operator.override(rec, args[3])
    if answer then return reply.ok(answer) end
    local problem = fence.check(c, id, rec, args[2], request, true)
    if problem then
      -- A repeat after a lost reply gets the first answer.
      local own = fence.own_attempt(c, id, rec, args[2])
      local before = own and own.paused and string.match(own.paused, '^' .. reason .. ':(.+)$')
      return before and reply.ok(before) or problem
    end
    local more
    answer, more = park(c, id, rec, args)
    if rec.paused then operator.remember(c, id, rec, request, answer) end
    return reply.ok(answer, more)
  end, flags)
end
