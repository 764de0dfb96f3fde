-- ff_create_waitpoint: the lease holder makes a pending waitpoint that buffers signals.
-- Keys: core, waitpoint, waitpoints (all, pending), pending_waitpoint_expiry, key store.
-- Arguments: execution_id, fence, waitpoint_id, waitpoint_key, expires in ms, prompt, details.
-- Replies: waitpoint_id, waitpoint_key, token. Errors: execution_not_found, those of the fence,
--   waitpoint_already_exists, waitpoint_limit_exceeded, hmac_secret_not_initialized,
--   invalid_secret. Events: none.
record.register_function('ff_create_waitpoint', record.checked, function(c, id, rec, args)
  local waitpoint_id, key = args[3], args[4]
  reply.stop_with(fence.check(c, id, rec, args[2], false, false))
  local stored = K.waitpoint(c.tag, waitpoint_id)
  local known = server.call('HMGET', stored, 'state', 'execution_id', 'waitpoint_token')
  -- The caller chose the id at random, so seeing it again means a repeated call.
  if known[1] == 'pending' and known[2] == id then return reply.ok(waitpoint_id, key, known[3]) end
  if known[1] == 'pending' or known[1] == 'active' then
    return reply.err('waitpoint_already_exists')
  end
  reply.stop_with(suspension.waitpoint_excess(c, id, 1))
  local token = tokens.mint(c, waitpoint_id, key, c.now)
  local expires = c:after(tonumber(args[5]))
  if not rec.waitpointed then record.set(c, id, rec, 'waitpointed', '1') end
  local fields = { 'execution_id', id, 'attempt_index', record.attempt_index(rec),
    'waitpoint_key', key, 'waitpoint_token', token, 'state', 'pending', 'created_at', c.now,
    'expires_at', expires }
  values.add(fields, 'prompt', args[6])
  values.add(fields, 'details', args[7])
  server.call('HSET', stored, unpack(fields))
  server.call('SADD', K.waitpoints(c.tag, id), waitpoint_id)
  server.call('SADD', K.pending_waitpoints(c.tag, id), waitpoint_id)
  server.call('ZADD', K.index(c.tag, 'pending_waitpoint_expiry'), expires, waitpoint_id)
  return reply.ok(waitpoint_id, key, token)
end, {})
