-- ff_sibling_group: cancel the upstreams that a decided join no longer needs, or only check whether
-- all of them have ended.
-- Keys: pending_cancel_groups, core, flow in, and those of ff_cancel for each sibling.
-- Arguments: flow_id, execution_id of the child, what to do (drain | reconcile).
-- Replies: `drained` | `already_drained` | `drained_sans_group` | `pending` (call again); or
--   `no_op` | `sremmed_stale` | `completed_drain`; then the number cancelled.
-- Errors: none. Events: completion (each sibling), flow_finished.
local MAX_SEEN = 2000

local function has_ended(c, id)
  local state = server.call('HGET', K.core(c.tag, id), 'state')
  return not state or S.is_terminal(state)
end

-- Of a join with very many edges the drain alone finds out.
local function all_ended(c, id, rec)
  local last = tonumber(string.match(rec.siblings, ' (%d+)$'))
  local cursor, seen = '0', 0
  repeat
    local page = server.call('HSCAN', K.into(c.tag, rec.flow_id, id), cursor, 'COUNT', 200)
    for i = 2, #page[2], 2 do
      local e = edges.parse(id, page[2][i])
      if e.state == 'u' and e.number <= last and not has_ended(c, edges.id_of(c, e.upstream)) then
        return false
      end
    end
    cursor, seen = page[1], seen + #page[2] / 2
  until cursor == '0' or seen >= MAX_SEEN
  return cursor == '0'
end

local function drain(c, key, name, id, rec)
  if not rec or not rec.siblings then
    server.call('SREM', key, name)
    return 'drained_sans_group'
  end
  if not cascade.cancel_siblings(c, id, rec) then return 'pending' end
  server.call('SREM', key, name)
  return 'drained'
end

local function reconcile(c, key, name, id, rec)
  if not rec or not rec.siblings then
    server.call('SREM', key, name)
    return 'sremmed_stale'
  end
  if not all_ended(c, id, rec) then return 'no_op' end
  record.clear(c, id, rec, 'sibling_scan', 'siblings')
  server.call('SREM', key, name)
  return 'completed_drain'
end

register('ff_sibling_group', function(keys, args)
  local c, flow_id, id = Context.open(keys[1], true), args[1], args[2]
  return reply.guarded(function()
    local key, name = K.index(c.tag, 'pending_cancel_groups'), flow_id .. '|' .. edges.uuid_of(id)
    local drains = args[3] == 'drain'
    if server.call('SISMEMBER', key, name) == 0 then
      return reply.ok(drains and 'already_drained' or 'no_op', 0)
    end
    local rec = record.read(c, id)
    if rec and rec.flow_id ~= flow_id then rec = nil end
    local answer = (drains and drain or reconcile)(c, key, name, id, rec)
    c:close()
    return reply.ok(answer, cascade.counts(c).cancelled)
  end, c, id)
end, { 'allow-oom' })
