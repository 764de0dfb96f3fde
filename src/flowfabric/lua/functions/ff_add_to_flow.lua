-- ff_add_to_flow: make an existing execution a member of a flow.
-- Keys: flow core, flow_index, members, core. Arguments: flow_id, execution_id.
-- Replies: `added` | `already_member`, node count. Errors: flow_not_found, flow_already_terminal,
--   execution_not_found, already_member_of_different_flow, invalid_input (namespace). Events: none.
register('ff_add_to_flow', function(keys, args)
  local c, flow_id, id = Context.open(keys[1]), args[1], args[2]
  return reply.guarded(function()
    local f, rec = flow.live(c, flow_id), record.checked(c, id)
    if not rec then return reply.err('execution_not_found') end
    if rec.flow_id and rec.flow_id ~= flow_id then
      return reply.err('already_member_of_different_flow', rec.flow_id)
    end
    if rec.flow_id then return reply.ok('already_member', f.node_count) end
    if rec.namespace ~= f.namespace then
      return reply.err('invalid_input', 'namespace: the flow is in ' .. f.namespace)
    end
    server.call('ZADD', K.index(c.tag, 'flow_index'), 0, flow_id)
    record.set(c, id, rec, 'flow_id', flow_id)
    graph.add_member(c, flow_id, f, id, rec)
    flow.settle(c)
    return reply.ok('added', f.node_count)
  end, c, id)
end, {})
