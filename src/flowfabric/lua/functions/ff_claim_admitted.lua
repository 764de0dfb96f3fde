-- ff_claim_admitted: claim executions that ff_claim_many said need admission, and that got it.
-- Keys: those of ff_claim_many.
-- Arguments: lane, worker (`id instance`), capabilities CSV, lease ttl ms, max, lease id prefix,
--   attempt id prefix, then execution ids.
-- Replies: rows; those that cannot be claimed now are missing. Errors: none.
-- Events: acquired, reclaimed, completion (at the cap).
register('ff_claim_admitted', function(keys, args)
  local c = Context.open(keys[1], #args > 8)
  local rows = claiming.admitted(c, claiming.wanted(args, 1), values.slice(args, 8, #args))
  c:close()
  return reply.ok(rows)
end, { 'allow-oom' })
