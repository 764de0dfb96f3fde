-- ff_waitpoint_token: the token of an open waitpoint, minted again when its kid has expired.
-- Keys: waitpoint, key store. Arguments: execution_id, waitpoint_id.
-- Replies: token | nothing if unknown, closed or of another execution.
-- Errors: hmac_secret_not_initialized, invalid_secret (invalid_token and token_expired only make
--   it mint another). Events: none.
reply.register_function('ff_waitpoint_token', function(c, id, args)
  local key = K.waitpoint(c.tag, args[2])
  local point = suspension.read_hash(key)
  if not point or point.execution_id ~= id
      or not (point.state == 'pending' or point.state == 'active') then
    return reply.ok(false)
  end
  local token = point.waitpoint_token or ''
  if not tokens.problem(c, token) then return reply.ok(token) end
  token = tokens.mint(c, args[2], point.waitpoint_key, tonumber(point.created_at))
  server.call('HSET', key, 'waitpoint_token', token)
  return reply.ok(token)
end, { 'allow-oom' })
