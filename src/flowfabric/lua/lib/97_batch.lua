-- Calls that take many executions at once.

-- Limits of a call with several items. The engine's callers send about half as many bytes.
local MAX_ITEMS, MAX_BYTES = 256, 8388608

function batch.excess(args, count)
  if count <= 1 then return nil end
  if count > MAX_ITEMS then return reply.err('batch_too_large', MAX_ITEMS .. ' items') end
  if values.bytes(args, 1) > MAX_BYTES then
    return reply.err('batch_too_large', MAX_BYTES .. ' bytes')
  end
end

-- One answer per id from `first` on; `error:<why>` for one that cannot be handled.
function batch.each(ids, first, handle)
  local answers = {}
  for i = first, #ids do
    local ok, answer = try(handle, ids[i])
    answers[#answers + 1] = ok and answer or not ok and 'error:' .. answer
  end
  return answers
end

-- Registers `handle(c, id, args)`, which returns one word for each id from argument `first` on.
function batch.register_function(name, first, handle, flags)
  register(name, function(keys, args)
    local c = Context.open(keys[1])
    local answers = batch.each(args, first, function(id) return handle(c, id, args) end)
    return reply.ok(answers, cascade.told(c))
  end, flags)
end

-- Calls `handle(tag, names)` for each partition in the arguments: tag, number of names, names.
function batch.each_place(args, first, handle)
  local at = first
  while at <= #args do
    local last = at + 1 + tonumber(args[at + 1])
    handle(args[at], values.slice(args, at + 2, last))
    at = last + 1
  end
end
