-- ff_set_lane: copy lane settings to one partition, so that creates and claims see them.
-- Keys: lane config. Arguments: lane, then name, value pairs; an empty value removes the setting.
-- Replies: nothing. Errors: none. Events: none; an active lane with work rings its doorbell.
register('ff_set_lane', function(keys, args)
  local c = Context.open(keys[1])
  local key = K.lane(c.tag, args[1], 'config')
  for i = 2, #args, 2 do record.store_setting(key, args[i], args[i + 1]) end
  if c:lane(args[1]).state == 'active' then waiting.ring_all(c, args[1]) end
  return reply.ok()
end, { 'allow-oom' })
