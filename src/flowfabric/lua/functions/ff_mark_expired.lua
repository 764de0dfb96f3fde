-- ff_mark_expired: move lapsed leases to where the next claim finds them.
-- Keys: core, lease_expiry, lane reclaimable. Arguments: any number of execution ids.
-- Replies per id: marked_expired | execution_not_found | not_active | already_expired |
--   already_revoked | unowned | not_yet_expired | cancelled (a member of a cancelled flow) |
--   error:<why>. Errors: none. Events: expired, completion (a member of a cancelled flow).
batch.register_function('ff_mark_expired', 1, function(c, id)
  local rec = record.checked_lease(c, id)
  if not rec or not S.is_active(rec.state) or S.is_unowned(rec.state) then
    c:zrem(K.index(c.tag, 'lease_expiry'), id)
    if not rec then return 'execution_not_found' end
    return S.is_active(rec.state) and 'unowned' or 'not_active'
  end
  if S.is_lease_lost(rec.state) then
    lease.offer_for_reclaim(c, id, rec)
    return S.is_lease_expired(rec.state) and 'already_expired' or 'already_revoked'
  end
  if tonumber(rec.lease_expires_at) > c.now then return 'not_yet_expired' end
  local f = flow.ending_member(c, rec)
  if f then
    ending.cancel(c, id, rec, 'flow_cascade', f.cancel_reason)
    return 'cancelled'
  end
  lease.mark_expired(c, id, rec)
  return 'marked_expired'
end, { 'allow-oom' })
