-- Operators' calls. They have no lease that identifies a repeat, so each carries a request id, and
-- the record keeps the last answers: a repeat after a lost reply gets the same answer, whatever has
-- happened since, and has no second effect.

local REMEMBERED = 4

function operator.answered(rec, request)
  if not rec.operator_requests then return nil end
  local _, at = string.find(rec.operator_requests, request .. ' ', 1, true)
  return at and string.match(rec.operator_requests, '^[^\n]*', at + 1)
end

-- The request id in `operator_override <request id>`, and the answer it got before; or nil.
function operator.override(rec, source)
  local request = string.match(source, '^operator_override (%S+)$')
  return request, request and operator.answered(rec, request)
end

function operator.remember(c, id, rec, request, answer)
  if not request then return end
  local text = request .. ' ' .. answer .. '\n' .. (rec.operator_requests or '')
  local at = 0
  for _ = 1, REMEMBERED do
    at = string.find(text, '\n', at + 1, true)
    if not at then break end
  end
  record.set(c, id, rec, 'operator_requests', at and string.sub(text, 1, at) or text)
end
