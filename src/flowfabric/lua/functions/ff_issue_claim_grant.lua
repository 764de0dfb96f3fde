-- ff_issue_claim_grant: reserve one eligible execution for one worker.
-- Keys: core, claim_grant, lane eligible, draining.
-- Arguments: execution_id, lane or empty, worker (`id instance`), capabilities CSV, ttl ms, token,
--   capability_hash, route_snapshot_json, admission_summary, what the caller found wrong with the
--   capabilities or empty, tasks CSV, whether the scheduler admitted it (1).
-- Replies: grant_expires_at, lane. Errors: execution_not_found, execution_not_eligible,
--   grant_already_exists, execution_not_in_eligible_set, invalid_capabilities,
--   capability_mismatch, invalid_input (lane_mismatch). Events: none.
granting.register_function('ff_issue_claim_grant', record.checked, function(c, id, rec, args)
  if not S.is_runnable(rec.state) or not S.is_eligible(rec.state)
      or c:is_closed(rec.lane_id) or workers.is_drained(c, args[3], rec) then
    return reply.err('execution_not_eligible')
  end
  reply.stop_with(granting.repeated(c, id, rec, args[6]))
  local index = K.eligible(c.tag, rec.lane_id, waiting.signature(rec))
  if not server.call('ZSCORE', index, id) then return reply.err('execution_not_in_eligible_set') end
  reply.stop_with(granting.capability_problem(c, id, rec, args))
  if admission.is_needed(rec) and args[12] ~= '1' then
    return reply.err('execution_not_eligible', 'needs admission')
  end
  return granting.write(c, id, rec, args)
end, { 'allow-oom' })
