-- ff_issue_claim_grant: reserve one eligible execution for one worker.
-- Keys: core, claim_grant, lane eligible / reclaimable, lane config, draining; at the reclaim cap also
--   those of a final failure.
-- Arguments: execution_id, lane or empty, worker (`id instance`), capabilities CSV, ttl ms, token,
--   capability_hash, route_snapshot_json, admission_summary, what the caller found wrong with the
--   capabilities or empty, tasks CSV, the number of the run that the scheduler admitted or empty,
--   whether it may be one whose lease was lost (1).
-- Replies: grant_expires_at, lane. Errors: execution_not_found, execution_not_eligible,
--   grant_already_exists, execution_not_in_eligible_set, invalid_capabilities,
--   capability_mismatch, max_retries_exhausted (a lost one, which has failed now), invalid_input
--   (lane_mismatch). Events: completion (at the cap).
local function refusal(c, rec, lost, worker)
  if not lost and not (S.is_runnable(rec.state) and S.is_eligible(rec.state)) then
    return reply.err('execution_not_eligible')
  end
  if c:is_closed(rec.lane_id) then return reply.err('execution_not_eligible', 'lane closed') end
  if workers.is_drained(c, worker, rec) then return reply.err('execution_not_eligible', 'worker draining') end
end

granting.register_function('ff_issue_claim_grant', record.checked, function(c, id, rec, args)
  local lost = args[13] == '1' and S.is_lease_lost(rec.state)
  if lost then
    record.check_lease(id, rec)
    lost = claiming.mode(c, rec) == 'reclaimed'
  end
  reply.stop_with(refusal(c, rec, lost, args[3]) or granting.repeated(c, id, rec, args[6]))
  local index = (lost and K.reclaimable or K.eligible)(c.tag, rec.lane_id, waiting.signature(rec))
  if not server.call('ZSCORE', index, id) then return reply.err('execution_not_in_eligible_set') end
  reply.stop_with(granting.capability_problem(c, id, rec, args))
  if not lost and admission.is_needed(rec) and tonumber(args[12]) ~= admission.run(rec) + 1 then
    return reply.err('execution_not_eligible', 'needs admission')
  end
  return lost and claiming.cap_problem(c, id, rec) or granting.write(c, id, rec, args)
end, { 'allow-oom' })
