-- ff_claim_many: take the best claimable executions of one lane and partition, fresh,
-- resumed or reclaimed, and return all that their handlers need. Leaves tasks that a worker with
-- `task:` does not offer to workers that do.
-- Keys: lane eligible, sigs, reclaimable, active, claimed; core, payload, tags; lease_expiry;
--   worker leases; attempt_timeout.
-- Arguments: lane, worker (`id instance`), capabilities CSV, lease ttl ms, max, lease id prefix,
--   attempt id prefix (the first 32 characters of a UUID; the engine appends four hex digits).
-- Replies: rows, number left (-1: the worker is being drained), tasks left to others, then per
--   execution that needs admission first: id, budgets CSV, quota policy, score. Errors: none.
-- Events: acquired, reclaimed, completion (at the cap).
register('ff_claim_many', function(keys, args)
  local c = Context.open(keys[1], args[5] ~= '1')
  local want = claiming.wanted(args, 1)
  local rows, left, unknown = claiming.many(c, want)
  c:close()
  return reply.ok(rows, left, unknown or false, want.needing)
end, { 'allow-oom' })
