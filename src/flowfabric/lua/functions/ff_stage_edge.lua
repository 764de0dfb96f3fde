-- ff_stage_edge: add an edge between two members; applied at once, if asked.
-- Keys: flow core, edges, in, out, core of both members and of those after them.
-- Arguments: flow_id, edge_id, upstream id, downstream id, dependency kind, data_passing_ref,
--   input_name, expected graph revision or empty, apply (1 | 0).
-- Replies: `staged` | `already_staged`, graph revision; with apply: `applied` | `already_applied`,
--   graph revision, open edges, resolution or empty.
-- Errors: self_referencing_edge, flow_not_found, dependency_already_exists, flow_already_terminal,
--   stale_graph_revision, invalid_input, execution_not_in_flow, cycle_detected, terminal.
-- Events: completion (members that the edge ends).
local MAX_REF_BYTES, MAX_NAME_BYTES = 1024, 64

local function is_same(e, kind, up_id, args)
  return e.kind == kind and e.upstream == edges.uuid_of(up_id) and e.ref == args[6]
    and e.input == args[7]
end

local function existing(c, flow_id, f, args)
  local edge_id, up_id, id = args[2], args[3], args[4]
  local child, place, e = edges.find(c, flow_id, edge_id)
  if not child then return nil end
  -- The edges of a deleted child are gone.
  if not e then return reply.err('dependency_already_exists', edge_id) end
  if child ~= id or not is_same(e, edges.KINDS[args[5]], up_id, args) then
    return reply.err('dependency_already_exists', edge_id, edges.id_of(c, e.upstream), child)
  end
  if args[9] ~= '1' then return reply.ok('already_staged', f.graph_revision) end
  local rec = record.checked(c, id)
  if e.state == 'g' then
    if flow.is_cancelled(f) then return reply.err('flow_already_terminal') end
    local open, resolution = graph.apply(c, flow_id, id, rec, place, e)
    return reply.ok('applied', f.graph_revision, open, resolution or '', cascade.told(c))
  end
  return reply.ok('already_applied', f.graph_revision, edges.open_count(edges.group(id, rec)), '')
end

local function membership_problem(c, flow_id, ...)
  for _, id in ipairs({ ... }) do
    local member = graph.upstream(c, id)
    if not member or member.flow_id ~= flow_id then
      return reply.err('execution_not_in_flow', id)
    end
  end
end

local function form_problem(args)
  if not edges.KINDS[args[5]] then
    return reply.err('invalid_input',
      'dependency_kind: must be one of success_only, terminal, failure_only')
  end
  if #args[6] > MAX_REF_BYTES then
    return reply.err('invalid_input', 'data_passing_ref: is longer than 1024 bytes')
  end
  if args[7] ~= '' and (#args[7] > MAX_NAME_BYTES or string.find(args[7], '[^%w_]')) then
    return reply.err('invalid_input', 'input_name: must be 1 to 64 letters, digits or underscores')
  end
end

register('ff_stage_edge', function(keys, args)
  local c = Context.open(keys[1])
  local flow_id, edge_id, up_id, id = args[1], args[2], args[3], args[4]
  return reply.guarded(function()
    if up_id == id then return reply.err('self_referencing_edge') end
    local f = flow.shown(c, flow_id)
    reply.stop_with(existing(c, flow_id, f, args))
    if flow.is_cancelled(f) then return reply.err('flow_already_terminal') end
    if args[8] ~= '' and tonumber(args[8]) ~= f.graph_revision then
      return reply.err('stale_graph_revision', values.text(f.graph_revision))
    end
    local kind = edges.KINDS[args[5]]
    reply.stop_with(form_problem(args) or membership_problem(c, flow_id, up_id, id)
      or args[7] ~= '' and graph.input_problem(c, flow_id, id, { [args[7]] = true }) or nil)
    local rec = args[9] == '1' and record.checked(c, id)
    if rec and S.is_terminal(rec.state) then return reply.err('terminal') end
    reply.stop_with(graph.cycle_problem(c, flow_id, up_id, id))
    local e, _, place = graph.add_edge(c, flow_id, f, id,
      { edge_id, edges.uuid_of(up_id), kind, args[7], args[6] }, 'g')
    if not rec then
      flow.settle(c)
      return reply.ok('staged', f.graph_revision)
    end
    local open, resolution = graph.apply(c, flow_id, id, rec, place, e)
    return reply.ok('applied', f.graph_revision, open, resolution or '', cascade.told(c))
  end, c, id)
end, {})
