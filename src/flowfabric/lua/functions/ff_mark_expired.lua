-- ff_mark_expired: move lapsed leases to where the next claim finds them.
-- Keys: core, lease_expiry, lane reclaimable. Arguments: any number of execution ids.
-- Replies per id: marked_expired | execution_not_found | not_active | already_expired |
--   already_revoked | unowned | not_yet_expired | error:<why>. Errors: none. Events: expired.
local function mark(c, id)
  local live = K.index(c.tag, 'lease_expiry')
  local rec = record.checked_lease(c, id)
  if not rec or not S.is_active(rec.state) then
    server.call('ZREM', live, id)
    return rec and 'not_active' or 'execution_not_found'
  end
  if S.is_unowned(rec.state) then
    server.call('ZREM', live, id)
    return 'unowned'
  end
  if S.is_lease_lost(rec.state) then
    lease.offer_for_reclaim(c, id, rec)
    return S.is_lease_expired(rec.state) and 'already_expired' or 'already_revoked'
  end
  if tonumber(rec.lease_expires_at) > c.now then return 'not_yet_expired' end
  lease.mark_expired(c, id, rec)
  return 'marked_expired'
end

register('ff_mark_expired', function(keys, args)
  local c = Context.open(keys[1])
  return reply.ok(batch.each(args, 1, function(id) return mark(c, id) end))
end, { 'allow-oom' })
