-- Calls on an operator's word alone: no lease makes them recognisable, so each carries a request
-- id. The record remembers the last ones with their answers; a repeat after a lost reply gets
-- its answer again, whatever happened since, and has no second effect.

local REMEMBERED = 4

-- The request id of the source `operator_override <request id>`; nil for any other source.
function operator.request(source) return string.match(source, '^operator_override (%S+)$') end

-- The answer this request got before, or nil.
function operator.answered(rec, request)
  if not rec.operator_requests then return nil end
  local _, at = string.find(rec.operator_requests, request .. ' ', 1, true)
  return at and string.match(rec.operator_requests, '^[^\n]*', at + 1)
end

function operator.remember(c, id, rec, request, answer)
  local text = request .. ' ' .. answer .. '\n' .. (rec.operator_requests or '')
  local at = 0
  for _ = 1, REMEMBERED do
    at = string.find(text, '\n', at + 1, true)
    if not at then break end
  end
  record.set(c, id, rec, { operator_requests = at and string.sub(text, 1, at) or text })
end
