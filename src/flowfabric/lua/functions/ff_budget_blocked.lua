-- ff_budget_blocked: note which executions wait for a budget, or that they no longer do.
-- Keys: budget, blocked. Arguments: budget_id, add | remove, any number of execution_ids.
-- Replies: how many changed. Errors: corruption. Events: none.
budgets.register_step('ff_budget_blocked', 0, function(b, args)
  local key, count = budgets.part(b, 'blocked'), 0
  for i = 3, #args do
    if args[2] == 'add' then
      count = count + server.call('ZADD', key, 'NX', values.text(b.now), args[i])
    else
      count = count + server.call('ZREM', key, args[i])
    end
  end
  return reply.ok(count)
end, { 'allow-oom' })
