-- The reply envelope of every function.

function reply.ok(...) return { 1, 'OK', ... } end
function reply.duplicate(id) return { 1, 'DUPLICATE', id } end
function reply.already(reason) return { 1, 'ALREADY_SATISFIED', reason } end
function reply.err(code, ...) return { 0, code, ... } end

-- An attempt that ended before the execution did is not its current one.
function reply.not_active(rec)
  local over = rec.between_attempts or S.between_attempts(rec.state)
  local attempt = not over and record.attempt_id(rec) or ''
  return reply.err('execution_not_active', S.outcome_name(rec.state),
    tostring(record.epoch(rec)), S.phase_name(rec.state), attempt)
end

-- What to answer when handling an execution has failed: `<id>: <field>: <why>`. Only now is
-- the record searched for the cause.
local function unreadable(tag, id, why)
  local context = id .. ': '
  if string.sub(why, 1, #context) == context then return reply.err('corruption', why) end
  local readable, flat = try(server.call, 'HGETALL', K.core(tag, id))
  if not readable then return reply.err('corruption', context .. 'record: is not a hash') end
  local rec = values.fields(flat)
  local problem = #flat > 0 and (record.problem(rec) or record.lease_problem(rec))
  return reply.err('corruption', context .. (problem or 'stored keys: ' .. why))
end

-- The answer for one item of a batch. A record that cannot be read fails alone: it must
-- not undo what the call has done for the others.
function reply.guarded(handle, c, id, ...)
  local ok, answer = try(handle, c, id, ...)
  if ok then return answer end
  return unreadable(c.tag, id, answer)
end

-- Registers a function for one execution, which its first argument names.
function reply.register_function(name, handle, flags)
  register(name, function(keys, args)
    local ok, answer = try(handle, keys, args)
    if ok then return answer end
    return unreadable(keys[1], args[1], answer)
  end, flags)
end
