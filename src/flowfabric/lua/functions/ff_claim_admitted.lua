-- ff_claim_admitted: claim executions that ff_claim_many said need admission, and that got it.
-- Keys: those of ff_claim_many.
-- Arguments: lane, worker (`id instance`), capabilities CSV, lease ttl ms, max, lease id prefix,
--   attempt id prefix, then per execution: execution id, the number of the run that was admitted.
-- Replies: rows; those that cannot be claimed now are missing. Errors: none.
-- Events: acquired, reclaimed, completion (at the cap).
register('ff_claim_admitted', function(keys, args)
  local c = Context.open(keys[1], #args > 9)
  local rows = claiming.admitted(c, claiming.wanted(args, 1), quota.runs(args, 8))
  c:close()
  return reply.ok(rows)
end, { 'allow-oom' })
