-- ff_apply_edge: make a staged edge count for its child.
-- Keys: flow core, edges, in, core of both members, indexes of the child.
-- Arguments: flow_id, edge_id, upstream id, downstream id, dependency kind, data_passing_ref (the
--   last four as far as the caller knows them, or empty).
-- Replies: `applied` | `already_applied`, open edges, resolution or empty.
-- Errors: flow_not_found, invalid_dependency, execution_not_found, execution_already_in_flow,
--   flow_already_terminal, terminal. Events: completion (members that the edge ends).
-- The name of an argument that differs from the edge, or nil.
local function differing(e, child, args)
  if args[3] ~= '' and edges.uuid_of(args[3]) ~= e.upstream then return 'upstream_execution_id' end
  if args[4] ~= '' and args[4] ~= child then return 'downstream_execution_id' end
  if args[5] ~= '' and edges.KINDS[args[5]] ~= e.kind then return 'dependency_kind' end
  if args[6] ~= '' and args[6] ~= e.ref then return 'data_passing_ref' end
end

register('ff_apply_edge', function(keys, args)
  local c, flow_id, edge_id = Context.open(keys[1]), args[1], args[2]
  return reply.guarded(function()
    local f = flow.shown(c, flow_id)
    local id, place, e = edges.find(c, flow_id, edge_id)
    if not id then return reply.err('invalid_dependency', edge_id) end
    -- The edges of a deleted child are gone.
    if not e then return reply.err('execution_not_found', id) end
    local other = differing(e, id, args)
    if other then return reply.err('invalid_dependency', edge_id, other) end
    local rec = record.checked(c, id)
    if not rec then return reply.err('execution_not_found') end
    if rec.flow_id ~= flow_id then return reply.err('execution_already_in_flow', rec.flow_id) end
    if e.state ~= 'g' then
      return reply.ok('already_applied', edges.open_count(edges.group(id, rec)), '')
    end
    if flow.is_cancelled(f) then return reply.err('flow_already_terminal') end
    local open, resolution = graph.apply(c, flow_id, id, rec, place, e)
    return reply.ok('applied', open, resolution or '', cascade.told(c))
  end, c, args[1])
end, {})
