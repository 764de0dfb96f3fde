-- ff_grant_and_claim: an operator takes one named execution, without capability or admission checks.
-- Keys: core, claim_grant, payload, tags, lane eligible / active, lease_expiry, worker leases,
--   attempt_timeout.
-- Arguments: execution_id, lane or empty, worker (`id instance`), lease ttl ms, lease_id, attempt_id.
-- Replies: claim row, lane. Errors: execution_not_found, execution_not_eligible, lease_conflict,
--   active_attempt_exists, grant_already_exists, execution_not_in_eligible_set,
--   invalid_input (lane_mismatch). Events: acquired (reason issue_grant_and_claim[_resumed]).
local function refusal(c, id, rec, lane)
  local problem = granting.lane_problem(rec, lane)
  if problem then return problem end
  if not S.is_runnable(rec.state) then return reply.err('execution_not_eligible') end
  if not S.is_unowned(rec.state) then return reply.err('lease_conflict') end
  if S.has_outcome(rec.state) then return reply.err('execution_not_eligible') end
  if S.has_running_attempt(rec.state) then return reply.err('active_attempt_exists') end
  if granting.live(c, rec) then return reply.err('grant_already_exists') end
  if not S.has_paused_attempt(rec.state) and not server.call('ZSCORE',
      K.eligible(c.tag, rec.lane_id, rec.required_capabilities), id) then
    return reply.err('execution_not_in_eligible_set')
  end
  if not S.is_eligible(rec.state) then return reply.err('execution_not_eligible') end
end

reply.register_function('ff_grant_and_claim', function(keys, args)
  local c = Context.open(keys[1])
  local id, lane, worker, ttl = args[1], args[2], args[3], tonumber(args[4])
  local lease_id, attempt_id = args[5], args[6]
  local rec = record.checked(c, id)
  if not rec then return reply.err('execution_not_found') end
  local mode = (S.has_paused_attempt(rec.state) or rec.resumed_at) and 'resumed' or 'fresh'
  local before = granting.replayed(c, id, rec, lease_id, mode == 'fresh' and attempt_id or '', mode)
  if before then return before end
  local problem = refusal(c, id, rec, lane)
  if problem then return problem end
  mode = S.has_paused_attempt(rec.state) and 'resumed' or 'fresh'
  claiming.take(c, id, rec, mode, {
    lease_prefix = lease_id, attempt_prefix = attempt_id, suffix = '', worker = worker, ttl = ttl,
    reason = mode == 'resumed' and 'issue_grant_and_claim_resumed' or 'issue_grant_and_claim',
  })
  return reply.ok(claiming.row(c, id, rec, mode), rec.lane_id)
end, { 'allow-oom' })
