-- ff_ack_returns: remove what was given back to budgets and quotas from what a partition owes.
-- Keys: returns. Arguments: number of entries that were given back, then those entries, then
--   entries that could not be given back and wait behind the others.
-- Replies: nothing. Errors: none. Events: none.
register('ff_ack_returns', function(keys, args)
  local c, count = Context.open(keys[1]), tonumber(args[1])
  local key = K.index(c.tag, 'returns')
  values.call('ZREM', key, values.slice(args, 2, 1 + count))
  for i = 2 + count, #args do server.call('ZADD', key, 'XX', c.now, args[i]) end
  return reply.ok()
end, { 'allow-oom' })
