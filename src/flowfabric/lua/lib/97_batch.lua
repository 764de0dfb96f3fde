-- Calls that take many executions at once.

-- What a call with several items may carry. The engine's own callers send about half the bytes.
local MAX_ITEMS, MAX_BYTES = 256, 8388608

-- The error of a call that would block the server for too long, or nil.
function batch.excess(args, count)
  if count <= 1 then return nil end
  if count > MAX_ITEMS then return reply.err('batch_too_large', MAX_ITEMS .. ' items') end
  if values.bytes(args, 1) > MAX_BYTES then
    return reply.err('batch_too_large', MAX_BYTES .. ' bytes')
  end
end

-- One answer per id from `first` on. A record that cannot be handled answers
-- `error:<why>`: it must not undo or hide what the call does for the others.
function batch.each(ids, first, handle)
  local answers = {}
  for i = first, #ids do
    local ok, answer = try(handle, ids[i])
    if not ok then answer = 'error:' .. answer end
    answers[#answers + 1] = answer
  end
  return answers
end
