-- ff_set_tags: add or replace tags in any phase.
-- Keys: core, tags. Arguments: execution_id, then key, value pairs (validated by the caller).
-- Replies: number of pairs written. Errors: execution_not_found. Events: none.
reply.register_function('ff_set_tags', function(keys, args)
  local c = Context.open(keys[1])
  local core = K.core(c.tag, args[1])
  if server.call('EXISTS', core) == 0 then return reply.err('execution_not_found') end
  local tags = K.tags(c.tag, args[1])
  server.call('HSET', core, 'tagged', 1, 'last_mutation_at', c.now)
  server.call('HSET', tags, unpack(args, 2))
  return reply.ok((#args - 1) / 2)
end, {})
