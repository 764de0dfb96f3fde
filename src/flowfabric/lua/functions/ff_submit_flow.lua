-- ff_submit_flow: make a flow with its members and edges, in one call or several; no member can run
-- before the last one. A repeat goes on where an earlier one stopped.
-- Keys: flow core, flow_index, flow_due, members, edges, in, out, held, and those of ff_create.
-- Arguments: flow_id, header (msgpack map), then items as in ff_create, upstreams before children.
--   Header: kind, ns, digest (of the whole graph), tags (flat list), part (1 for the first of several
--   calls), last (true with the last), hold (release comes later), parent (the member that owns it),
--   depth (of the flow, if the parent is in another partition), more (edges, as in ff_extend_flow).
-- Replies: `submitted` | `already_submitted` | `accepted` (more calls must follow); graph revision.
-- Errors: flow_submission_conflict, execution_being_deleted, and those of ff_create; of a subflow: execution_not_found,
--   invalid_input, terminal; nothing of the call is written then.
-- Events: completion (a member whose upstream has ended); rings the doorbell.
local function opened(c, flow_id, header)
  local f = flow.read(c, flow_id)
  if not f then
    f = flow.create(c, flow_id, header.kind, header.ns, header)
    local whole = header.last and header.part == 1
    if not whole or header.hold or header.waits then flow.set(c, flow_id, 'held_from', 1) end
    if header.parent and header.hold then flow.set(c, flow_id, 'hold', '1') end
    if not whole then
      flow.set(c, flow_id, 'submitting', c.now)
      flow.expect_deletion(c, flow_id, f)
    end
    return f
  end
  if f.digest ~= header.digest then reply.refuse('flow_submission_conflict', flow_id) end
  return f
end

-- The member that will own the flow, nil if there is none or it is in another partition; the flow
-- waits until that member no longer waits for others.
local function parent_of(c, flow_id, header)
  if not header.parent then return nil end
  header.waits = true
  if header.depth then return nil end
  local rec
  rec, header.depth = subflows.parent(c, header.parent, flow_id, header.ns)
  header.waits = not rec.subflow_open
  return rec
end

-- The last call: the whole flow is there.
local function complete(c, flow_id, header, parent)
  local f = flow.read(c, flow_id)
  if f.submitting then
    flow.clear(c, flow_id, 'submitting')
    flow.expect_deletion(c, flow_id, f)
  end
  if header.waits then flow.set(c, flow_id, 'awaits_parent', '1') end
  if parent then
    subflows.attach(c, header.parent, parent, flow_id)
  elseif header.parent then
    subflows.ask_parent(c, flow_id, f)
  end
  if not header.hold and not header.waits and f.held_from then flow.release(c, flow_id) end
end

local function submit(c, args)
  local flow_id, header = args[1], cmsgpack.unpack(args[2])
  local known = flow_purging.replaceable(c, flow_id)
  if known and known.digest == header.digest and not known.submitting then
    return reply.ok('already_submitted', known.graph_revision)
  end
  local parent = parent_of(c, flow_id, header)
  -- The engine has checked the graph as a whole.
  local common, items, ids = { flow = flow_id, ns = header.ns, checked = true }, {}, {}
  for i = 3, #args, 5 do
    local item = { i, creating.options(common, args[i + 4]) }
    local problem = creating.problem(c, item[2])
    if problem then
      problem[#problem + 1] = item[2].node
      return problem
    end
    items[#items + 1], ids[#ids + 1] = item, args[i]
  end
  common.is_new = creating.are_new(c, ids)
  opened(c, flow_id, header)
  graph.widen(c, flow_id, header.more or {})
  for _, item in ipairs(items) do
    local i = item[1]
    local answer = creating.create(c, args[i], args[i + 1], args[i + 2], args[i + 3], item[2])
    if type(answer) == 'table' and answer[1] == 0 then reply.stop_with(answer) end
  end
  c:close()
  if not header.last then return reply.ok('accepted', flow.read(c, flow_id).graph_revision) end
  complete(c, flow_id, header, parent)
  c:close()
  return reply.ok('submitted', flow.read(c, flow_id).graph_revision, cascade.told(c))
end

register('ff_submit_flow', function(keys, args)
  local problem = batch.excess(args, (#args - 2) / 5)
  if problem then return problem end
  local c = Context.open(keys[1], true)
  return reply.guarded(function() return submit(c, args) end, c, args[1])
end, {})
