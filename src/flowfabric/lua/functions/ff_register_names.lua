-- ff_register_names: add names to a registry of partitions or namespaces in use.
-- Keys: the registry itself. Arguments: any number of names. Replies: nothing. Errors: none. Events: none.
register('ff_register_names', function(keys, args)
  for i = 1, #args do server.call('SADD', keys[1], args[i]) end
  return reply.ok()
end, { 'allow-oom' })
