-- ff_rescore: give some waiting executions the score of their lane's current priority weight.
-- Keys: rescore, lane eligible, reclaimable, core, lane config. Arguments: about how many.
-- Replies: number looked at, 1 if more are left. Errors: none. Events: none.
register('ff_rescore', function(keys, args)
  return reply.ok(lanes.rescore(Context.open(keys[1]), tonumber(args[1])))
end, { 'allow-oom' })
