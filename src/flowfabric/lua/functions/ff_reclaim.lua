-- ff_reclaim: turn a reclaim grant into a lease and a new attempt, or fail at the cap.
-- Keys: core, claim_grant, draining, attempt, payload, tags, lane reclaimable / active / terminal,
--   lease_expiry, both workers' leases, attempt_timeout, execution_deadline.
-- Arguments: execution_id, lane or empty, worker (`id instance`), grant token, lease ttl ms,
--   lease_id, attempt_id, caller's cap or empty.
-- Replies: claim row, lane. Errors: execution_not_found, execution_not_reclaimable,
--   max_retries_exhausted (failed, now or before), invalid_claim_grant, claim_grant_expired,
--   flow_already_terminal, invalid_input (lane_mismatch). Events: reclaimed | completion.
granting.register_function('ff_reclaim', record.checked_lease, function(c, id, rec, args)
  local worker, ttl, lease_id, attempt_id = args[3], tonumber(args[5]), args[6], args[7]
  local own_cap = args[8] ~= '' and args[8] or nil
  return granting.replayed(c, id, rec, lease_id, attempt_id, 'reclaimed')
    or claiming.reclaim_problem(c, rec, worker, own_cap)
    or claiming.cap_problem(c, id, rec, own_cap)
    or granting.refusal(c, id, rec, worker, args[4])
    or granting.claim(c, id, rec, 'reclaimed',
      { lease_prefix = lease_id, attempt_prefix = attempt_id, worker = worker, ttl = ttl })
end, { 'allow-oom' })
