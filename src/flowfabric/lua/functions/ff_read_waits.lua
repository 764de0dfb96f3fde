-- ff_read_waits: the waitpoints of the present run of an execution that nobody waits on now, so
-- that a handler that starts again finds what was answered. A replay begins a new run.
-- Keys: core, waitpoints, their signals. Arguments: execution_id, then keys whose
--   signals are wanted.
-- Replies: rows of waitpoint id, its fields (flat list), ids of its signals, and when they are
--   wanted and few, fields and payload of each. Errors: execution_not_found, corruption.
local FEW = 16

local function contents(id, signal_ids)
  local found = {}
  for i, signal_id in ipairs(signal_ids) do
    local key = K.signal(id, signal_id)
    found[i] = { server.call('HGETALL', key), server.call('GET', K.signal_payload(id, signal_id)) }
  end
  return found
end

reply.register_function('ff_read_waits', function(keys, args)
  local c = Context.open(keys[1])
  local id = args[1]
  local rec = record.read(c, id)
  if not rec then return reply.err('execution_not_found') end
  local first, rows, wanted = values.number(id, 'run_from', rec.run_from) or 0, {}, {}
  for i = 2, #args do wanted[args[i]] = true end
  for _, waitpoint_id in ipairs(server.call('SMEMBERS', K.waitpoints(c.tag, id))) do
    local flat = server.call('HGETALL', K.waitpoint(c.tag, waitpoint_id))
    local point = values.fields(flat)
    -- What cannot be compared is for the reader to refuse.
    if #flat > 0 and point.state ~= 'active'
        and (tonumber(point.attempt_index or 0) or first) >= first then
      local signal_ids = server.call('LRANGE', K.waitpoint_signals(c.tag, waitpoint_id), 0, -1)
      rows[#rows + 1] = {
        waitpoint_id, flat, signal_ids,
        wanted[point.waitpoint_key] and #signal_ids <= FEW and contents(id, signal_ids) or false,
      }
    end
  end
  return reply.ok(rows)
end, { 'no-writes' })
