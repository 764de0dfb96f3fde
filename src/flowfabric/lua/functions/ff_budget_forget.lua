-- ff_budget_forget: delete the ledgers of executions that no longer exist; their usage stays.
-- Keys: ledgers, ledger index. Arguments: budget_id, any number of execution_ids.
-- Replies: how many. Errors: corruption. Events: none.
budgets.register_step('ff_budget_forget', 0, function(b, args)
  local count, index = 0, budgets.part(b, 'by_exec:index')
  for i = 2, #args do
    server.call('DEL', K.ledger(b.tag, b.id, args[i]))
    count = count + server.call('ZREM', index, args[i])
  end
  return reply.ok(count)
end, { 'allow-oom' })
