-- ff_set_join: set how the edges of a child decide, before the first one is applied.
-- Keys: flow core, core. Arguments: flow_id, execution_id, join (as stored; empty: all must succeed).
-- Replies: `set` | `already_set`. Errors: flow_not_found, flow_already_terminal,
--   execution_not_in_flow, invalid_input (edge_group_policy_already_fixed). Events: none.
register('ff_set_join', function(keys, args)
  local c, flow_id, id, join = Context.open(keys[1]), args[1], args[2], args[3]
  return reply.guarded(function()
    flow.live(c, flow_id)
    local rec = record.checked(c, id)
    if not rec or rec.flow_id ~= flow_id then return reply.err('execution_not_in_flow', id) end
    if (rec.join or '') == join then return reply.ok('already_set') end
    if edges.group(id, rec).n > 0 then
      return reply.err('invalid_input', 'policy: edge_group_policy_already_fixed')
    end
    if join == '' then
      record.clear(c, id, rec, 'join')
    else
      record.set(c, id, rec, 'join', join)
    end
    return reply.ok('set')
  end, c, id)
end, {})
