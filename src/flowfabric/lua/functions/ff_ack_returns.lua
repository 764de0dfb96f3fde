-- ff_ack_returns: remove what was given back to budgets and quotas from what a partition owes.
-- Keys: returns, core. Arguments: number of entries that were given back, then those entries, then
--   entries that could not be given back and wait behind the others.
-- Replies: the entries that were removed before although their executions run: a new run took over
--   the slot, which must be confirmed again. Errors: none. Events: none.
register('ff_ack_returns', function(keys, args)
  local c, count, removed, running = Context.open(keys[1]), tonumber(args[1]), 0, {}
  local key, given_back = K.index(c.tag, 'returns'), values.slice(args, 2, 1 + tonumber(args[1]))
  for first, last in values.pieces(given_back) do
    removed = removed + server.call('ZREM', key, unpack(given_back, first, last))
  end
  -- A claim removes the entry of its execution, so one that runs had none left.
  for _, entry in ipairs(removed < count and given_back or {}) do
    if admission.runs(c, entry) then running[#running + 1] = entry end
  end
  for i = 2 + count, #args do server.call('ZADD', key, 'XX', c.now, args[i]) end
  return reply.ok(running)
end, { 'allow-oom' })
