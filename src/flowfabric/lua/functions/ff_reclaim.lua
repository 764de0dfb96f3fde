-- ff_reclaim: turn a reclaim grant into a lease and a new attempt, or fail at the cap.
-- Keys: core, claim_grant, attempt, payload, tags, lane reclaimable / active / terminal,
--   lease_expiry, both workers' leases, attempt_timeout, execution_deadline.
-- Arguments: execution_id, lane or empty, worker (`id instance`), grant token, lease ttl ms,
--   lease_id, attempt_id, caller's cap or empty.
-- Replies: claim row. Errors: execution_not_found, execution_not_reclaimable,
--   max_retries_exhausted (failed, now or before), invalid_claim_grant, claim_grant_expired,
--   invalid_input (lane_mismatch). Events: reclaimed | completion.
reply.register_function('ff_reclaim', function(keys, args)
  local c = Context.open(keys[1])
  local id, lane, worker, token = args[1], args[2], args[3], args[4]
  local ttl, lease_id, attempt_id = tonumber(args[5]), args[6], args[7]
  local rec = record.checked_lease(c, id)
  if not rec then return reply.err('execution_not_found') end
  local before = granting.replayed(c, id, rec, lease_id, attempt_id, 'reclaimed')
  if before then return before end
  local problem = granting.lane_problem(rec, lane)
  if problem then return problem end
  local own_cap = args[8] ~= '' and args[8] or nil
  local reached = claiming.ended_at_cap(rec, own_cap)
  if reached then return claiming.cap_reached(reached) end
  if not S.is_lease_lost(rec.state) or c:is_closed(rec.lane_id) then
    return reply.err('execution_not_reclaimable')
  end
  local cap = claiming.reclaim_cap(rec, own_cap)
  if tonumber(rec.lease_reclaim_count or 0) >= cap then
    claiming.end_at_cap(c, id, rec)
    return claiming.cap_reached(cap)
  end
  problem = granting.refusal(c, id, rec, worker, token)
  if problem then return problem end
  claiming.take(c, id, rec, 'reclaimed',
    { lease_prefix = lease_id, attempt_prefix = attempt_id, suffix = '', worker = worker, ttl = ttl })
  return reply.ok(claiming.row(c, id, rec, 'reclaimed'))
end, { 'allow-oom' })
