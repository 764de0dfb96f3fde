-- The reply envelope of every function.
local reply = {}

function reply.ok(...) return { 1, 'OK', ... } end
function reply.duplicate(id) return { 1, 'DUPLICATE', id } end
function reply.already(reason) return { 1, 'ALREADY_SATISFIED', reason } end
function reply.err(code, ...) return { 0, code, ... } end

-- A retry or replay that is still to come has no attempt yet.
local PENDING = { t = true, p = true }

function reply.not_active(rec)
  local attempt = not PENDING[S.attempt(rec.state)] and record.attempt_id(rec) or ''
  return reply.err('execution_not_active', S.outcome_name(rec.state),
    tostring(record.epoch(rec)), S.phase_name(rec.state), attempt)
end

-- A whole number in range, or nil.
function reply.integer(text, low, high)
  local value = tonumber(text)
  if not value or value ~= math.floor(value) or value < low or value > high then return nil end
  return value
end

-- The answer for one item of a batch. A record that cannot be read fails alone: it must
-- not undo what the call has done for the others.
function reply.guarded(handle, ...)
  local ok, answer = pcall(handle, ...)
  if ok then return answer end
  return reply.err('corruption', tostring(type(answer) == 'table' and answer.err or answer))
end
