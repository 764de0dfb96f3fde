-- ff_read_waits: the waitpoints of the present run of an execution that nobody waits on now, so
-- that a handler that starts again finds what was answered. A replay begins a new run.
-- Keys: core, waitpoints, their signals. Arguments: execution_id, cursor (0: from the start), then
--   keys whose signals are wanted.
-- Replies: rows of waitpoint id, its fields (flat list), ids of its signals, and when they are
--   wanted and few, fields and payload of each; then the next cursor, 0 at the end. A row may come
--   twice. Errors: execution_not_found, corruption.
local FEW = 16
-- Waitpoints of a call, and bytes of the signals read along.
local PAGE = 100
local MAX_BYTES = 1048576

local function contents(id, signal_ids, read)
  if #signal_ids > FEW or read.bytes >= MAX_BYTES then return false end
  local found = {}
  for i, signal_id in ipairs(signal_ids) do
    local key = K.signal(id, signal_id)
    local payload = server.call('GET', K.signal_payload(id, signal_id))
    found[i] = { server.call('HGETALL', key), payload }
    read.bytes = read.bytes + (payload and #payload or 0)
  end
  return found
end

reply.register_function('ff_read_waits', function(keys, args)
  local c = Context.open(keys[1])
  local id = args[1]
  local rec = record.read(c, id)
  if not rec then return reply.err('execution_not_found') end
  local first, rows, wanted = values.number(id, 'run_from', rec.run_from) or 0, {}, {}
  for i = 3, #args do wanted[args[i]] = true end
  local page, read = server.call('SSCAN', K.waitpoints(c.tag, id), args[2], 'COUNT', PAGE), { bytes = 0 }
  for _, waitpoint_id in ipairs(page[2]) do
    local flat = server.call('HGETALL', K.waitpoint(c.tag, waitpoint_id))
    local point = values.fields(flat)
    -- What cannot be compared is for the reader to refuse.
    if #flat > 0 and point.state ~= 'active'
        and (tonumber(point.attempt_index or 0) or first) >= first then
      local signal_ids = server.call('LRANGE', K.waitpoint_signals(c.tag, waitpoint_id), 0, -1)
      rows[#rows + 1] = {
        waitpoint_id, flat, signal_ids,
        wanted[point.waitpoint_key] and contents(id, signal_ids, read) or false,
      }
    end
  end
  return reply.ok(rows, page[1])
end, { 'no-writes' })
