-- ff_rotate_secret: make a new signing secret the current one; the old verifies for a while.
-- Keys: key store. Arguments: new kid, new secret (lowercase hex), grace ms.
-- Replies: `rotated`, previous kid or empty, kids removed | `noop`. Errors: rotation_conflict.
-- Events: none.

register('ff_rotate_secret', function(keys, args)
  local tag, now = keys[1], clock.now()
  local kid, secret, expires = args[1], args[2], clock.after(now, tonumber(args[3]))
  local store = K.secrets(tag)
  local found = server.call('HMGET', store, 'current_kid', 'secret:' .. kid, 'expires_at:' .. kid)
  local current = found[1]
  if current == kid then
    if not found[2] then server.call('HSET', store, 'secret:' .. kid, secret) end
    if found[2] and string.lower(found[2]) ~= secret then return reply.err('rotation_conflict', kid) end
    return reply.ok('noop')
  end
  local verifying = found[2] and tokens.in_grace(found[3], now)
  if verifying and string.lower(found[2]) ~= secret then
    return reply.err('rotation_conflict', kid)
  end
  if current then server.call('HSET', store, 'expires_at:' .. current, expires) end
  server.call('HSET', store, 'current_kid', kid, 'secret:' .. kid, secret)
  server.call('HDEL', store, 'expires_at:' .. kid)
  if current then
    server.call('HSET', store, 'previous_kid', current, 'previous_expires_at', expires)
  end
  local removed, _, past = 0, tokens.kids(tag, now)
  for old, expires_at in pairs(past) do
    if not expires_at then
      server.call('HDEL', store, 'secret:' .. old, 'expires_at:' .. old)
      removed = removed + 1
    end
  end
  return reply.ok('rotated', current or '', removed)
end, { 'allow-oom' })
