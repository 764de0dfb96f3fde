-- ff_seed_secret: install the first signing secret; a stored one always wins.
-- On a single server one call may name many partitions; in a cluster each gets its own.
-- Keys: key store of each partition. Arguments: kid, secret (lowercase hex) or empty, repair
--   (1: give the current kid, which must be this one, its lost secret), then partition tags.
-- Replies per tag: [installed | match | mismatch | repaired | torn | empty, current kid or empty].
-- Errors: none. Events: none.
local function seed(tag, kid, secret, repair)
  local store = K.secrets(tag)
  local current = server.call('HGET', store, 'current_kid')
  if not current then
    if secret == '' then return { 'empty', '' } end
    server.call('HSET', store, 'current_kid', kid, 'secret:' .. kid, secret)
    server.call('HDEL', store, 'expires_at:' .. kid)
    return { 'installed', kid }
  end
  local stored = server.call('HGET', store, 'secret:' .. current)
  if not stored then
    if not repair or current ~= kid or secret == '' then return { 'torn', current } end
    server.call('HSET', store, 'secret:' .. current, secret)
    return { 'repaired', current }
  end
  if secret == '' or string.lower(stored) == secret then return { 'match', current } end
  return { 'mismatch', current }
end

register('ff_seed_secret', function(_, args)
  local replies = {}
  for i = 4, #args do replies[i - 3] = seed(args[i], args[1], args[2], args[3] == '1') end
  return reply.ok(replies)
end, { 'allow-oom' })
