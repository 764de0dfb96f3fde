-- ff_create_flow: make an empty flow.
-- Keys: flow core, flow_index. Arguments: flow_id, flow_kind, namespace.
-- Replies: `created` | ALREADY_SATISFIED. Errors: invalid_input (another kind or namespace).
-- Events: none.
register('ff_create_flow', function(keys, args)
  local c, flow_id = Context.open(keys[1]), args[1]
  local f = flow.read(c, flow_id)
  if not f then
    flow.create(c, flow_id, args[2], args[3])
    return reply.ok('created')
  end
  server.call('ZADD', K.index(c.tag, 'flow_index'), 0, flow_id)
  if f.flow_kind ~= args[2] then
    return reply.err('invalid_input', 'flow_kind: the flow exists with ' .. f.flow_kind)
  end
  if f.namespace ~= args[3] then
    return reply.err('invalid_input', 'namespace: the flow exists in ' .. f.namespace)
  end
  return reply.already('exists')
end, {})
