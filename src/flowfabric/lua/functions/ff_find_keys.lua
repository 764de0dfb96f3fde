-- ff_find_keys: look for idempotency keys where a lane's executions were created before, and have the
--   partition refuse submitters that still create them here.
-- Keys: lane placed, idem, core. Arguments: lane, version of its placement, number of shards, then per
--   key: namespace, key, digest as hex or empty.
-- Replies per key: execution_id or empty | [0, code, detail...]. Errors: none; per key:
--   idempotency_conflict (key, id). Events: none.
register('ff_find_keys', function(keys, args)
  local c, found = Context.open(keys[1]), {}
  lanes.place(c, args[1], args[2], args[3])
  for i = 4, #args, 3 do
    local digest = args[i + 2] ~= '' and args[i + 2] or nil
    found[#found + 1] = reply.guarded(function(_, key)
      return creating.keyed(c, args[i], key, digest) or ''
    end, c, args[i + 1])
  end
  return reply.ok(found)
end, { 'allow-oom' })
