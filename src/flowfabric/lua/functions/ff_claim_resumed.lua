-- ff_claim_resumed: turn a grant into a new lease on the same, paused attempt.
-- Keys: core, claim_grant, payload, tags, lane eligible / active, lease_expiry, worker leases,
--   attempt_timeout.
-- Arguments: execution_id, lane or empty, worker (`id instance`), grant token, lease ttl ms, lease_id.
-- Replies: claim row, lane. Errors: execution_not_found, execution_not_leaseable,
--   not_a_resumed_execution, invalid_claim_grant, claim_grant_expired,
--   invalid_input (lane_mismatch). Events: acquired (reason claim_resumed).
reply.register_function('ff_claim_resumed', function(keys, args)
  local c = Context.open(keys[1])
  local id, lane, worker, token = args[1], args[2], args[3], args[4]
  local ttl, lease_id = tonumber(args[5]), args[6]
  local rec = record.checked(c, id)
  if not rec then return reply.err('execution_not_found') end
  local before = granting.replayed(c, id, rec, lease_id, '', 'resumed')
  if before then return before end
  local problem = granting.lane_problem(rec, lane)
  if problem then return problem end
  if not S.is_runnable(rec.state) then return reply.err('execution_not_leaseable') end
  if not S.has_paused_attempt(rec.state) then return reply.err('not_a_resumed_execution') end
  if not S.is_eligible(rec.state) or c:is_closed(rec.lane_id) then
    return reply.err('execution_not_leaseable')
  end
  problem = granting.refusal(c, id, rec, worker, token)
  if problem then return problem end
  claiming.take(c, id, rec, 'resumed', { lease_prefix = lease_id, suffix = '', worker = worker, ttl = ttl })
  return reply.ok(claiming.row(c, id, rec, 'resumed'), rec.lane_id)
end, { 'allow-oom' })
