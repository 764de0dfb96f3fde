-- ff_store_lane: store settings of a lane for the whole deployment.
-- Keys: the settings themselves. Arguments: any number of settings: name, value; an empty value removes one.
-- Replies: the state before, empty if none was stored. Errors: none. Events: none.
register('ff_store_lane', function(keys, args)
  local before = server.call('HGET', keys[1], 'state') or ''
  for i = 1, #args, 2 do record.store_setting(keys[1], args[i], args[i + 1]) end
  return reply.ok(before)
end, { 'allow-oom' })
