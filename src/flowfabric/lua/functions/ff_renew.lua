-- ff_renew: extend leases that their holders still own.
-- Keys: core, lease_expiry, lane active.
-- Arguments: per lease: execution_id, fence, ttl ms.
-- Replies per lease: expires_at | [expires_at, quota policy, number of the run] | [0, code, detail...].
-- Errors: execution_not_found and those of the fence. Events: renewed (where the lane asks
--   for it), expired (a lapsed lease).
local function renew(c, id, text, ttl)
  local rec = record.read(c, id)
  if not rec then return reply.err('execution_not_found') end
  reply.stop_with(fence.check(c, id, rec, text, false, true))
  local expires = c.now + ttl
  server.call('HSET', K.core(c.tag, id), 'lease_expires_at', expires, 'lease_last_renewed_at', c.now)
  c:zadd(K.index(c.tag, 'lease_expiry'), expires, id)
  c:zadd(K.lane(c.tag, rec.lane_id, 'active'), expires, id)
  if c:lane(rec.lane_id).emit_renewals then events.emit_lease(c, 'renewed', id, rec) end
  if not rec.quota_policy_id then return expires end
  return { expires, rec.quota_policy_id, admission.run(rec) }
end

register('ff_renew', function(keys, args)
  local c = Context.open(keys[1], #args > 3)
  local replies = {}
  for i = 1, #args, 3 do
    replies[#replies + 1] = reply.guarded(renew, c, args[i], args[i + 1], tonumber(args[i + 2]))
  end
  c:close()
  return reply.ok(replies)
end, { 'allow-oom' })
