-- ff_claim_execution: turn a claim grant into a lease and a new attempt.
-- Keys: core, claim_grant, draining, payload, tags, lane eligible / active, lease_expiry, worker
--   leases, attempt_timeout.
-- Arguments: execution_id, lane or empty, worker (`id instance`), grant token, lease ttl ms,
--   lease_id, attempt_id.
-- Replies: claim row, lane. Errors: execution_not_found, execution_not_leaseable, lease_conflict,
--   active_attempt_exists, use_claim_resumed_execution, invalid_claim_grant,
--   claim_grant_expired, flow_already_terminal, invalid_input (lane_mismatch).
-- Events: acquired, completion (a member of a cancelled flow).
local function refusal(c, rec, worker)
  if not S.is_runnable(rec.state) then return reply.err('execution_not_leaseable') end
  if not S.is_unowned(rec.state) then return reply.err('lease_conflict') end
  if not S.is_eligible(rec.state) then return reply.err('execution_not_leaseable') end
  if S.has_outcome(rec.state) then return reply.err('execution_not_leaseable') end
  if S.has_running_attempt(rec.state) then return reply.err('active_attempt_exists') end
  if S.has_paused_attempt(rec.state) then return reply.err('use_claim_resumed_execution') end
  if c:is_closed(rec.lane_id) or workers.is_drained(c, worker, rec) then
    return reply.err('execution_not_leaseable')
  end
end

granting.register_function('ff_claim_execution', record.checked, function(c, id, rec, args)
  local worker, ttl, lease_id, attempt_id = args[3], tonumber(args[5]), args[6], args[7]
  return granting.replayed(c, id, rec, lease_id, attempt_id, 'fresh')
    or refusal(c, rec, worker) or granting.refusal(c, id, rec, worker, args[4])
    or granting.claim(c, id, rec, 'fresh',
      { lease_prefix = lease_id, attempt_prefix = attempt_id, worker = worker, ttl = ttl })
end, { 'allow-oom' })
