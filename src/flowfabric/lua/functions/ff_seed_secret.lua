-- ff_seed_secret: install the first signing secret; a stored one always wins.
-- On a single server one call may name many partitions; in a cluster each gets its own.
-- Keys: key store of each partition. Arguments: kid, secret (lowercase hex) or empty, partition tags.
-- Replies per tag: installed | match | mismatch | repaired | torn. Errors: none. Events: none.
local function seed(tag, kid, secret)
  local store = tokens.store_key(tag)
  local current = server.call('HGET', store, 'current_kid')
  if not current then
    if secret == '' then return 'torn' end
    server.call('HSET', store, 'current_kid', kid, 'secret:' .. kid, secret)
    return 'installed'
  end
  local stored = server.call('HGET', store, 'secret:' .. current)
  if not stored then
    -- Only the configured kid proves the configured secret right.
    if current ~= kid or secret == '' then return 'torn' end
    server.call('HSET', store, 'secret:' .. current, secret)
    return 'repaired'
  end
  if secret == '' or string.lower(stored) == secret then return 'match' end
  return 'mismatch'
end

server.register_function('ff_seed_secret', function(_, args)
  local replies = {}
  for i = 3, #args do replies[i - 2] = seed(args[i], args[1], args[2]) end
  return reply.ok(replies)
end)
