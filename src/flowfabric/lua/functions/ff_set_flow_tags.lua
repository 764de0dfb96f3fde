-- ff_set_flow_tags: set tags of a flow; other tags stay.
-- Keys: flow core, flow tags. Arguments: flow_id, then name, value pairs.
-- Replies: number set. Errors: flow_not_found. Events: none.
register('ff_set_flow_tags', function(keys, args)
  local c, flow_id = Context.open(keys[1]), args[1]
  local f = flow.read(c, flow_id)
  if not f or not flow.is_shown(f) then return reply.err('flow_not_found') end
  values.call('HSET', K.flow_tags(c.tag, flow_id), values.slice(args, 2, #args))
  flow.set(c, flow_id, 'last_mutation_at', c.now)
  return reply.ok((#args - 1) / 2)
end, {})
