-- The reply envelope of every function, and how functions for one execution are registered.
-- Functions named `…_problem` and `…_excess` return an error reply, or nil.

local effects

-- Reports a side effect for the caller's metrics: a letter, then the details.
function reply.add_effect(effect) effects = (effects or '') .. ' ' .. effect end

-- The caller delivers what executions of this call return to budgets and quotas.
local function status()
  local owed, did = admission.owed_in() or 'OK', effects
  if not did then return owed end
  effects = nil
  return owed .. did
end

function reply.ok(...) return { 1, status(), ... } end
function reply.duplicate(id) return { 1, 'DUPLICATE', id } end
function reply.already(reason) return { 1, 'ALREADY_SATISFIED', reason } end
function reply.err(code, ...) return { 0, code, ... } end

-- Stops handling an execution and returns this answer, if there is one.
function reply.stop_with(answer)
  if answer then error({ final = answer }, 0) end
end
function reply.refuse(...) reply.stop_with(reply.err(...)) end

-- An attempt that ended before its execution is not current.
function reply.not_active(rec)
  local over = rec.between_attempts or S.between_attempts(rec.state)
  local attempt = not over and record.attempt_id(rec) or ''
  return reply.err('execution_not_active', S.outcome_name(rec.state),
    tostring(record.epoch(rec)), S.phase_name(rec.state), attempt)
end

-- The answer after an error: `<id>: <field>: <why>`. The record is checked for the cause only now.
local function unreadable(tag, id, why)
  local context = id .. ': '
  if string.sub(why, 1, #context) == context then return reply.err('corruption', why) end
  local readable, flat = try(server.call, 'HGETALL', K.core(tag, id))
  if not readable then return reply.err('corruption', context .. 'record: is not a hash') end
  local rec = values.fields(flat)
  local problem = #flat > 0 and (record.problem(rec) or record.lease_problem(rec))
  return reply.err('corruption', context .. (problem or 'stored keys: ' .. why))
end

-- The answer for one item of a batch; an unreadable record must not affect the others.
function reply.guarded(handle, c, id, ...)
  local ok, answer = try(handle, c, id, ...)
  if ok then return answer end
  return unreadable(c.tag, id, answer)
end

-- Registers `handle(c, id, args)` for one execution, whose id is the first argument.
function reply.register_function(name, handle, flags)
  register(name, function(keys, args)
    local c = Context.open(keys[1])
    local answer = reply.guarded(handle, c, args[1], args)
    flow.settle(c)
    return answer
  end, flags)
end

-- Registers `handle(c, id, rec, args)`, which gets the record as `read` returns it.
function record.register_function(name, read, handle, flags)
  reply.register_function(name, function(c, id, args)
    local rec = read(c, id)
    if not rec then return reply.err('execution_not_found') end
    return handle(c, id, rec, args)
  end, flags)
end
