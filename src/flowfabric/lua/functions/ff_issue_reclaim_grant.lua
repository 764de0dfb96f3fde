-- ff_issue_reclaim_grant: reserve an execution whose lease expired or was revoked.
-- Keys: core, claim_grant; at the cap also those of a final failure.
-- Arguments: execution_id, lane or empty, worker (`id instance`), capabilities CSV, ttl ms, token,
--   capability_hash, route_snapshot_json, admission_summary, what the caller found wrong with the
--   capabilities or empty.
-- Replies: grant_expires_at, lane. Errors: execution_not_found, execution_not_reclaimable,
--   grant_already_exists, invalid_capabilities, capability_mismatch, max_retries_exhausted (the
--   execution has failed, now or before), invalid_input (lane_mismatch). Events: completion (at the cap).
reply.register_function('ff_issue_reclaim_grant', function(keys, args)
  local c = Context.open(keys[1])
  local id = args[1]
  local rec = record.checked_lease(c, id)
  if not rec then return reply.err('execution_not_found') end
  local problem = granting.lane_problem(rec, args[2])
  if problem then return problem end
  local reached = claiming.ended_at_cap(rec)
  if reached then return claiming.cap_reached(reached) end
  if not S.is_lease_lost(rec.state) or c:is_closed(rec.lane_id) then
    return reply.err('execution_not_reclaimable')
  end
  if granting.live(c, rec) then return granting.repeated(c, id, rec, args[6]) end
  problem = granting.capability_problem(c, id, rec, args[4], args[10])
  if problem then return problem end
  local cap = claiming.reclaim_cap(rec)
  if tonumber(rec.lease_reclaim_count or 0) >= cap then
    claiming.end_at_cap(c, id, rec)
    return claiming.cap_reached(cap)
  end
  local expires = granting.write(c, id, rec, {
    worker = args[3], ttl = tonumber(args[5]), token = args[6], capability_hash = args[7],
    route_snapshot_json = args[8], admission_summary = args[9],
  })
  return reply.ok(expires, rec.lane_id)
end, { 'allow-oom' })
