-- ff_extend_flow: add members and edges to a flow, in one call or several; with several, no new
-- member runs before the last one. A repeat adds nothing twice.
-- Keys: flow core, members, edges, in, out, held, and those of ff_create.
-- Arguments: flow_id, namespace, part (1 for the first of several calls), last (1 | 0), then number
--   of items, items as in ff_create, late edges (msgpack list; edges into existing members), more
--   edges (msgpack list; of members that earlier calls of this extension made with their first ones).
-- Replies: `extended` | `already_extended` | `accepted`; graph revision.
-- Errors: flow_not_found, flow_already_terminal, execution_not_in_flow, invalid_input, terminal,
--   cycle_detected, and those of ff_create. Events: completion (members that an edge ends).
local function extend(c, args)
  local flow_id, first, last = args[1], args[3] == '1', args[4] == '1'
  local f = flow.shown(c, flow_id)
  local items, late, more = graph.parts(args, 5, { flow = flow_id, ns = args[2] })
  if flow.is_cancelled(f) then
    if not graph.is_stored(c, flow_id, items, late, more) then
      return reply.err('flow_already_terminal')
    end
    return reply.ok(last and 'already_extended' or 'accepted', f.graph_revision, 0)
  end
  local added, problem = graph.extend(c, flow_id, items, late, more, first and not last)
  if problem then return problem end
  if not last then return reply.ok('accepted', f.graph_revision, added, cascade.told(c)) end
  graph.end_extension(c, flow_id)
  return reply.ok(added > 0 and 'extended' or 'already_extended', f.graph_revision, added,
    cascade.told(c))
end

register('ff_extend_flow', function(keys, args)
  local c = Context.open(keys[1], true)
  return reply.guarded(function() return extend(c, args) end, c, args[1])
end, {})
