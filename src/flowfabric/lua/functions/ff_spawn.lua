-- ff_spawn: the lease holder adds members to its flow and edges from them to itself, in one call or
-- several; with several, no new member runs before the last one. It may park until they are decided,
-- in the last call.
-- Keys: those of ff_extend_flow and ff_wait_children.
-- Arguments: execution_id, fence, wait (1 | 0), part, last, then number of items, items, late edges
--   and more edges as in ff_extend_flow.
-- Replies: `accepted` | `spawned` | `moved` (parked), graph revision.
-- Errors: execution_not_found, those of the fence, execution_not_in_flow, flow_already_terminal,
--   invalid_input, terminal, cycle_detected, and those of ff_create.
-- Events: released, expired (a lapsed lease), completion (members that an edge ends).
register('ff_spawn', function(keys, args)
  local c, id = Context.open(keys[1], true), args[1]
  return reply.guarded(function()
    local rec = record.checked_lease(c, id)
    if not rec then return reply.err('execution_not_found') end
    local problem = fence.check(c, id, rec, args[2], false, true)
    if problem then
      local own = fence.own_attempt(c, id, rec, args[2])
      local parked = own and own.paused == 'waiting_children:moved' and args[3] == '1'
      if not parked then return problem end
      return reply.ok('moved', flow.read(c, rec.flow_id).graph_revision)
    end
    if not rec.flow_id then return reply.err('execution_not_in_flow', id) end
    local f = flow.live(c, rec.flow_id)
    local first, last = args[4] == '1', args[5] == '1'
    local items, late, more = graph.parts(args, 6, { flow = rec.flow_id, ns = rec.namespace })
    local _, refusal = graph.extend(c, rec.flow_id, items, late, more, first and not last)
    if refusal then return refusal end
    if not last then return reply.ok('accepted', f.graph_revision, cascade.told(c)) end
    graph.end_extension(c, rec.flow_id)
    rec = record.checked_lease(c, id)
    local g = edges.group(id, rec)
    if args[3] ~= '1' or g.state ~= 'p' or edges.open_count(g) == 0 then
      return reply.ok('spawned', f.graph_revision, cascade.told(c))
    end
    pausing.release(c, id, rec, S.waiting_children('i'), 'waiting_children:moved', {})
    c:close()
    return reply.ok('moved', f.graph_revision, cascade.told(c))
  end, c, id)
end, {})
