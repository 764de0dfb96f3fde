-- ff_claim_execution: turn a claim grant into a lease and a new attempt.
-- Keys: core, claim_grant, payload, tags, lane eligible / active, lease_expiry, worker leases,
--   attempt_timeout.
-- Arguments: execution_id, lane or empty, worker (`id instance`), grant token, lease ttl ms,
--   lease_id, attempt_id.
-- Replies: claim row, lane. Errors: execution_not_found, execution_not_leaseable, lease_conflict,
--   active_attempt_exists, use_claim_resumed_execution, invalid_claim_grant,
--   claim_grant_expired, invalid_input (lane_mismatch). Events: acquired.
local function refusal(c, id, rec, lane)
  local problem = granting.lane_problem(rec, lane)
  if problem then return problem end
  if not S.is_runnable(rec.state) then return reply.err('execution_not_leaseable') end
  if not S.is_unowned(rec.state) then return reply.err('lease_conflict') end
  if not S.is_eligible(rec.state) then return reply.err('execution_not_leaseable') end
  if S.has_outcome(rec.state) then return reply.err('execution_not_leaseable') end
  if S.has_running_attempt(rec.state) then return reply.err('active_attempt_exists') end
  if S.has_paused_attempt(rec.state) then return reply.err('use_claim_resumed_execution') end
  if c:is_closed(rec.lane_id) then return reply.err('execution_not_leaseable') end
end

reply.register_function('ff_claim_execution', function(keys, args)
  local c = Context.open(keys[1])
  local id, lane, worker, token = args[1], args[2], args[3], args[4]
  local ttl, lease_id, attempt_id = tonumber(args[5]), args[6], args[7]
  local rec = record.checked(c, id)
  if not rec then return reply.err('execution_not_found') end
  local before = granting.replayed(c, id, rec, lease_id, attempt_id, 'fresh')
  if before then return before end
  local problem = refusal(c, id, rec, lane) or granting.refusal(c, id, rec, worker, token)
  if problem then return problem end
  claiming.take(c, id, rec, 'fresh',
    { lease_prefix = lease_id, attempt_prefix = attempt_id, suffix = '', worker = worker, ttl = ttl })
  return reply.ok(claiming.row(c, id, rec, 'fresh'), rec.lane_id)
end, { 'allow-oom' })
