-- ff_issue_claim_grant: reserve one eligible execution for one worker.
-- Keys: core, claim_grant, lane eligible.
-- Arguments: execution_id, lane or empty, worker (`id instance`), capabilities CSV, ttl ms, token,
--   capability_hash, route_snapshot_json, admission_summary, what the caller found wrong with the
--   capabilities or empty.
-- Replies: grant_expires_at. Errors: execution_not_found, execution_not_eligible,
--   grant_already_exists, execution_not_in_eligible_set, invalid_capabilities,
--   capability_mismatch, invalid_input (lane_mismatch). Events: none.
reply.register_function('ff_issue_claim_grant', function(keys, args)
  local c = Context.open(keys[1])
  local id = args[1]
  local rec = record.checked(c, id)
  if not rec then return reply.err('execution_not_found') end
  local problem = granting.lane_problem(rec, args[2])
  if problem then return problem end
  if not S.is_runnable(rec.state) or not S.is_eligible(rec.state)
      or c:is_closed(rec.lane_id) then
    return reply.err('execution_not_eligible')
  end
  if granting.live(c, rec) then return granting.repeated(c, id, rec, args[6]) end
  local index = K.eligible(c.tag, rec.lane_id, rec.required_capabilities)
  if not server.call('ZSCORE', index, id) then return reply.err('execution_not_in_eligible_set') end
  problem = granting.capability_problem(c, id, rec, args[4], args[10])
  if problem then return problem end
  local expires = granting.write(c, id, rec, {
    worker = args[3], ttl = tonumber(args[5]), token = args[6], capability_hash = args[7],
    route_snapshot_json = args[8], admission_summary = args[9],
  })
  return reply.ok(expires, rec.lane_id)
end, { 'allow-oom' })
