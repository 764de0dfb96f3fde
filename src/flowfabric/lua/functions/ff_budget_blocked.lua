-- ff_budget_blocked: note which executions wait for a budget, or that they no longer do. Nothing waits
-- for a budget that is gone; what is still noted there can be removed.
-- Keys: budget, blocked. Arguments: budget_id, add | remove, any number of execution_ids.
-- Replies: how many changed. Errors: corruption. Events: none.
local function note(tag, args)
  local id, adds = args[1], args[2] == 'add'
  local key, count, b = K.budget_part(tag, id, 'blocked'), 0, adds and budgets.read(tag, id)
  for i = 3, #args do
    count = count + (b and server.call('ZADD', key, 'NX', values.text(b.now), args[i])
      or server.call('ZREM', key, args[i]))
  end
  return reply.ok(count)
end

register('ff_budget_blocked', function(keys, args)
  return budgets.guarded(args[1], note, keys[1], args)
end, { 'allow-oom' })
