-- ff_issue_reclaim_grant: reserve an execution whose lease expired or was revoked.
-- Keys: core, claim_grant, draining; at the cap also those of a final failure.
-- Arguments: execution_id, lane or empty, worker (`id instance`), capabilities CSV, ttl ms, token,
--   capability_hash, route_snapshot_json, admission_summary, what the caller found wrong with the
--   capabilities or empty, tasks CSV.
-- Replies: grant_expires_at, lane. Errors: execution_not_found, execution_not_reclaimable,
--   grant_already_exists, invalid_capabilities, capability_mismatch, max_retries_exhausted (the
--   execution has failed, now or before), invalid_input (lane_mismatch). Events: completion (at the cap).
granting.register_function('ff_issue_reclaim_grant', record.checked_lease, function(c, id, rec, args)
  return claiming.reclaim_problem(c, rec, args[3])
    or granting.repeated(c, id, rec, args[6])
    or granting.capability_problem(c, id, rec, args)
    or claiming.cap_problem(c, id, rec)
    or granting.write(c, id, rec, args)
end, { 'allow-oom' })
