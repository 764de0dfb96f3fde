-- ff_resolve_edge: tell a child that one of its upstreams ended.
-- Keys: flow core, edges, in, core of both members, indexes of the child.
-- Arguments: flow_id, edge_id, outcome of an upstream that was deleted (letter); the record tells
--   that of any other.
-- Replies: `satisfied` | `impossible` | `pending` | `already_fired` | `already_resolved`, whether the
--   child got the result or was skipped (1 | 0). Errors: flow_not_found, invalid_dependency,
--   invariant_violation (counters that no edge is left for), execution_not_terminal (the upstream).
--   Events: completion (members that the edge ends).
register('ff_resolve_edge', function(keys, args)
  local c, flow_id, edge_id = Context.open(keys[1]), args[1], args[2]
  return reply.guarded(function()
    flow.shown(c, flow_id)
    local id, place, e = edges.find(c, flow_id, edge_id)
    if not e then return reply.err('invalid_dependency', edge_id) end
    local rec = record.checked(c, id)
    if rec and e.state == 'u' and edges.open_count(edges.group(id, rec)) < 1 then
      return reply.err('invariant_violation', id, rec.deps or '')
    end
    local up_id = edges.id_of(c, e.upstream)
    local up = record.read(c, up_id) or { state = S.terminal(args[3], 'n') }
    if not S.is_terminal(up.state) then return reply.err('execution_not_terminal', up_id) end
    local answer, more = cascade.resolve(c, flow_id, place, id, up_id, up)
    if answer == 'invalid_dependency' then return reply.err('invalid_dependency', edge_id) end
    c:close()
    return reply.ok(answer, more and 1 or 0, cascade.told(c))
  end, c, flow_id)
end, { 'allow-oom' })
