-- ff_claim_resumed: turn a grant into a new lease on the same, paused attempt.
-- Keys: core, claim_grant, draining, payload, tags, lane eligible / active, lease_expiry, worker
--   leases, attempt_timeout.
-- Arguments: execution_id, lane or empty, worker (`id instance`), grant token, lease ttl ms, lease_id.
-- Replies: claim row, lane. Errors: execution_not_found, execution_not_leaseable,
--   not_a_resumed_execution, invalid_claim_grant, claim_grant_expired,
--   flow_already_terminal, invalid_input (lane_mismatch). Events: acquired (reason claim_resumed),
--   completion (a member of a cancelled flow).
local function refusal(c, rec, worker)
  if not S.is_runnable(rec.state) then return reply.err('execution_not_leaseable') end
  if not S.has_paused_attempt(rec.state) then return reply.err('not_a_resumed_execution') end
  if not S.is_eligible(rec.state) or c:is_closed(rec.lane_id) or workers.is_drained(c, worker, rec) then
    return reply.err('execution_not_leaseable')
  end
end

granting.register_function('ff_claim_resumed', record.checked, function(c, id, rec, args)
  local worker, ttl, lease_id = args[3], tonumber(args[5]), args[6]
  return granting.replayed(c, id, rec, lease_id, '', 'resumed')
    or refusal(c, rec, worker) or granting.refusal(c, id, rec, worker, args[4])
    or granting.claim(c, id, rec, 'resumed',
      { lease_prefix = lease_id, worker = worker, ttl = ttl })
end, { 'allow-oom' })
