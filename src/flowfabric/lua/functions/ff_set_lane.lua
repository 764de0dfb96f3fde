-- ff_set_lane: copy lane settings to one partition, so that creates and claims see them.
-- Keys: lane config, placed, eligible, reclaimable, sigs; rescore. Arguments: lane, version, number of
--   shards, then the settings that differ from the defaults: name, value. A version older than the
--   stored one changes nothing.
-- Replies: nothing. Errors: none. Events: none; rings for work that the lane gives out.
register('ff_set_lane', function(keys, args)
  lanes.copy(Context.open(keys[1]), args[1], args[2], args[3], args, 4)
  return reply.ok()
end, { 'allow-oom' })
