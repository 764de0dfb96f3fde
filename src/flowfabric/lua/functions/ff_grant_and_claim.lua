-- ff_grant_and_claim: an operator takes one named execution, without capability or admission checks.
-- Keys: core, claim_grant, payload, tags, lane eligible / active, lease_expiry, worker leases,
--   attempt_timeout.
-- Arguments: execution_id, lane or empty, worker (`id instance`), lease ttl ms, lease_id, attempt_id.
-- Replies: claim row, lane. Errors: execution_not_found, execution_not_eligible, lease_conflict,
--   active_attempt_exists, grant_already_exists, execution_not_in_eligible_set,
--   flow_already_terminal, invalid_input (lane_mismatch). Events: acquired (reason
--   issue_grant_and_claim[_resumed]), completion (a member of a cancelled flow).
local function refusal(c, id, rec)
  if not S.is_runnable(rec.state) then return reply.err('execution_not_eligible') end
  if not S.is_unowned(rec.state) then return reply.err('lease_conflict') end
  if S.has_outcome(rec.state) then return reply.err('execution_not_eligible') end
  if S.has_running_attempt(rec.state) then return reply.err('active_attempt_exists') end
  if granting.live(c, rec) then return reply.err('grant_already_exists') end
  if not S.has_paused_attempt(rec.state) and not server.call('ZSCORE',
      K.eligible(c.tag, rec.lane_id, waiting.signature(rec)), id) then
    return reply.err('execution_not_in_eligible_set')
  end
  if not S.is_eligible(rec.state) then return reply.err('execution_not_eligible') end
end

granting.register_function('ff_grant_and_claim', record.checked, function(c, id, rec, args)
  local lease_id, attempt_id = args[5], args[6]
  local paused = S.has_paused_attempt(rec.state)
  local resumed = paused or rec.resumed_at
  return granting.replayed(c, id, rec, lease_id, resumed and '' or attempt_id,
      resumed and 'resumed' or 'fresh')
    or refusal(c, id, rec)
    or granting.claim(c, id, rec, paused and 'resumed' or 'fresh', {
      lease_prefix = lease_id, attempt_prefix = attempt_id, worker = args[3],
      ttl = tonumber(args[4]), reason = 'issue_grant_and_claim' .. (paused and '_resumed' or ''),
    })
end, { 'allow-oom' })
