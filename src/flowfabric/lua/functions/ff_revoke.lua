-- ff_revoke: take a lease away now; the next claim continues the execution.
-- Keys: core, lease_expiry, lane reclaimable, worker leases, returns.
-- Arguments: execution_id, expected lease_id or empty, reason, revoked_by, request id.
-- Replies: OK lease_id, epoch | ALREADY_SATISFIED no_active_lease, already_revoked, already_expired.
-- Errors: execution_not_found, stale_lease. Events: revoked.
record.register_function('ff_revoke', record.checked_lease, function(c, id, rec, args)
  local expected, reason = args[2], args[3]
  local before = operator.answered(rec, args[5])
  if before then return reply.ok(string.match(before, '^(%S+)/(%d+)$')) end
  if not S.is_active(rec.state) then return reply.already('no_active_lease') end
  if S.is_lease_revoked(rec.state) then return reply.already('already_revoked') end
  if S.is_lease_expired(rec.state) then return reply.already('already_expired') end
  local held = record.lease_id(rec)
  if expected ~= '' and expected ~= held then
    return reply.err('stale_lease', 'expected ' .. expected .. ', current ' .. held)
  end
  local fields = { 'blocking_detail', reason == '' and 'lease revoked' or 'lease revoked: ' .. reason,
    'lease_revoked_at', c.now, 'last_transition_at', c.now }
  record.add_or_clear(c, id, rec, fields, 'lease_revoke_reason', reason)
  record.transition(c, id, rec, S.REVOKED, unpack(fields))
  if rec.held_budgets then admission.give_back(c, id, rec, true) end
  server.call('SREM', K.worker_leases(c.tag, record.worker_instance(rec)), id)
  events.emit_lease(c, 'revoked', id, rec, 'r', reason, 'by', args[4])
  streams.close(c, id, rec, 'lease_revoked')
  lease.offer_for_reclaim(c, id, rec)
  operator.remember(c, id, rec, args[5], rec.lease)
  return reply.ok(held, record.epoch(rec))
end, { 'allow-oom' })
