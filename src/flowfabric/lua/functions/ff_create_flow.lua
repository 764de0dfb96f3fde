-- ff_create_flow: make an empty flow.
-- Keys: flow core, flow_index; those of ff_delete_flow (an earlier flow of that id).
-- Arguments: flow_id, flow_kind, namespace. Replies: `created` | ALREADY_SATISFIED.
-- Errors: invalid_input (another kind or namespace), execution_being_deleted.
-- Events: flow_cancel_requested, completion (subflows of the earlier flow).
local function create(c, flow_id, args)
  local f = flow_purging.replaceable(c, flow_id)
  if not f then
    flow.create(c, flow_id, args[2], args[3])
    return reply.ok('created')
  end
  -- Compared first, and not shown: the caller may not see that namespace.
  if f.namespace ~= args[3] then
    return reply.err('invalid_input', 'namespace: the flow exists in another namespace')
  end
  if f.flow_kind ~= args[2] then
    return reply.err('invalid_input', 'flow_kind: the flow exists with ' .. f.flow_kind)
  end
  server.call('ZADD', K.index(c.tag, 'flow_index'), 0, flow_id)
  return reply.already('exists')
end

register('ff_create_flow', function(keys, args)
  local c = Context.open(keys[1])
  return reply.guarded(function() return create(c, args[1], args) end, c, args[1])
end, {})
