-- ff_audit_flow: compare the counters of a flow with its members, and repair them; delete it if its
-- retention is over, or if its submission was given up.
-- Keys: flow core, members, core, flow_due; those of ff_delete_flow.
-- Arguments: flow_id, number of the last member of the page before, changes of the flow at the first
--   page or empty, msgpack map of what earlier pages counted.
-- Replies: `more`, number, changes, counts | `consistent` | `repaired`, drift | `changed` (it went on
--   meanwhile) | `submitting` | `deleting` (call again) | `deleted` | `orphan_removed`.
-- Errors: none. Events: flow_finished (the repaired counters say so), flow_cancel_requested,
--   completion (subflows that have not ended, the member that owns the flow).
local PAGE = 400

local function count(c, flow_id, page, counts)
  for i = 1, #page, 2 do
    local ok, state = try(server.call, 'HGET', K.core(c.tag, page[i]), 'state')
    if ok and not state then
      -- Its record is lost.
      graph.remove_member(c, flow_id, page[i])
    else
      local name = ok and S.is_code(state) and S.public(state) or 'unreadable'
      counts[name] = (counts[name] or 0) + 1
    end
  end
end

register('ff_audit_flow', function(keys, args)
  local c, flow_id, from, since = Context.open(keys[1]), args[1], args[2], args[3]
  local ok, f = try(flow.read, c, flow_id)
  if not ok then return reply.ok('changed') end
  if not f then
    for _, name in ipairs({ 'flow_index', 'flow_due' }) do
      server.call('ZREM', K.index(c.tag, name), flow_id)
    end
    return reply.ok('orphan_removed')
  end
  if f.deleting then return reply.ok(flow_purging.step(c, flow_id) and 'deleted' or 'deleting') end
  local due = flow.expect_deletion(c, flow_id, f)
  if due and due <= c.now then
    flow.set(c, flow_id, 'deleting', '1')
    return reply.ok('deleting')
  end
  if f.submitting then return reply.ok('submitting') end
  local changes, counts = values.text(flow.number(f, 'changes')), cmsgpack.unpack(args[4])
  if since ~= '' and since ~= changes then return reply.ok('changed') end
  local page = server.call('ZRANGE', K.members(c.tag, flow_id), '(' .. from, '+inf', 'BYSCORE',
    'LIMIT', 0, PAGE, 'WITHSCORES')
  count(c, flow_id, page, counts)
  if #page == 2 * PAGE then return reply.ok('more', page[#page], changes, cmsgpack.pack(counts)) end
  -- A member that cannot be read may be in any state.
  if counts.unreadable then return reply.ok('changed') end
  local drift = flow.recount(c, flow_id, f, counts)
  flow.settle(c)
  if #drift == 0 then return reply.ok('consistent') end
  return reply.ok('repaired', drift)
end, { 'allow-oom' })
