-- ff_read_waits: the waitpoints of the present run of an execution that nobody waits on now, so
-- that a handler that starts again finds what was answered. A replay begins a new run.
-- Keys: core, waitpoints, their signals. Arguments: execution_id, then keys whose
--   signals are wanted.
-- Replies: rows of id, key, token, state, attempt index, close reason, closed_at (0 while open),
--   whether a wait on it has ended (0 | 1), ids of its signals, and when they are wanted and few,
--   fields and payload of each. Errors: execution_not_found.
local FEW = 16

local function contents(id, signal_ids)
  local found = {}
  for i, signal_id in ipairs(signal_ids) do
    local key = K.signal(id, signal_id)
    found[i] = { server.call('HGETALL', key), server.call('GET', K.signal_payload(id, signal_id)) }
  end
  return found
end

register('ff_read_waits', function(keys, args)
  local c = Context.open(keys[1])
  local id = args[1]
  local core = server.call('HMGET', K.core(c.tag, id), 'state', 'run_from')
  if not core[1] then return reply.err('execution_not_found') end
  local first, rows, wanted = tonumber(core[2] or 0), {}, {}
  for i = 2, #args do wanted[args[i]] = true end
  for _, waitpoint_id in ipairs(server.call('SMEMBERS', K.waitpoints(c.tag, id))) do
    local key = K.waitpoint(c.tag, waitpoint_id)
    local point = suspension.read_hash(key)
    if point and point.state ~= 'active' and tonumber(point.attempt_index or 0) >= first then
      -- One that was never waited on is closed without either.
      local ended = point.state == 'closed' and (point.suspension_id or point.satisfied_at)
      local signal_ids = server.call('LRANGE', K.waitpoint_signals(c.tag, waitpoint_id), 0, -1)
      rows[#rows + 1] = {
        waitpoint_id, point.waitpoint_key, point.waitpoint_token or '', point.state,
        tonumber(point.attempt_index or 0), point.close_reason or '',
        tonumber(point.closed_at or 0), ended and 1 or 0,
        signal_ids,
        wanted[point.waitpoint_key] and #signal_ids <= FEW and contents(id, signal_ids) or false,
      }
    end
  end
  return reply.ok(rows)
end, { 'no-writes' })
