-- ff_read_waits: the waitpoints of the current run of an execution, except active ones, so that a
-- restarted handler finds the earlier answers. A replay starts a new run.
-- Keys: core, waitpoints, their signals. Arguments: execution_id, cursor (0: from the start), then
--   keys whose signals are wanted.
-- Replies: rows of waitpoint id, its fields (flat list), ids of its signals, and, if they are
--   wanted and few, fields and payload of each; nothing instead of a part whose key has the wrong
--   type. Then the next cursor, 0 at the end. A row may come twice.
-- Errors: execution_not_found, corruption.
local FEW = 16
-- Waitpoints per call, and bytes of the signals read with them.
local PAGE = 100
local MAX_BYTES = 1048576

local function stored(...)
  local readable, found = try(server.call, ...)
  return readable and found
end

local function contents(id, signal_ids, read)
  if not signal_ids or #signal_ids > FEW or read.bytes >= MAX_BYTES then return false end
  local found = {}
  for i, signal_id in ipairs(signal_ids) do
    local payload = server.call('GET', K.signal_payload(id, signal_id))
    found[i] = { server.call('HGETALL', K.signal(id, signal_id)), payload }
    read.bytes = read.bytes + (payload and #payload or 0)
  end
  return found
end

record.register_function('ff_read_waits', record.read, function(c, id, rec, args)
  local first, rows, wanted = tonumber(rec.run_from or 0), {}, {}
  for i = 3, #args do wanted[args[i]] = true end
  local page, read = server.call('SSCAN', K.waitpoints(c.tag, id), args[2], 'COUNT', PAGE), { bytes = 0 }
  for _, waitpoint_id in ipairs(page[2]) do
    local flat = stored('HGETALL', K.waitpoint(c.tag, waitpoint_id))
    local point = values.fields(flat or {})
    -- The caller refuses an index that cannot be compared.
    if not flat or (#flat > 0 and point.state ~= 'active'
        and (tonumber(point.attempt_index or 0) or first) >= first) then
      local signal_ids = stored('LRANGE', K.waitpoint_signals(c.tag, waitpoint_id), 0, -1)
      local readable, found = try(contents, id, wanted[point.waitpoint_key] and signal_ids, read)
      rows[#rows + 1] = { waitpoint_id, flat, signal_ids, readable and found }
    end
  end
  return reply.ok(rows, page[1])
end, { 'no-writes' })
