-- ff_budget_release: take back what an execution's ledger recorded since the last reset.
-- Keys: budget, usage, ledger, ledger index, usage mark.
-- Arguments: budget_id, request id, execution_id. Replies: released | noop.
-- Errors: budget_not_found, corruption. Events: none.
budgets.register_function('ff_budget_release', function(b, args)
  local key = K.ledger(b.tag, b.id, args[3])
  local ledger = values.fields(server.call('HGETALL', key))
  local usage, args_of_usage = budgets.usage(b), {}
  if ledger._period == budgets.period(b) then
    ledger._period = nil
    for name, spent in pairs(ledger) do
      values.append(args_of_usage,
        { name, values.text(math.max(0, (usage[name] or 0) - tonumber(spent))) })
    end
  end
  server.call('DEL', key)
  server.call('ZREM', budgets.part(b, 'by_exec:index'), args[3])
  if #args_of_usage == 0 then return reply.ok('noop') end
  server.call('HSET', budgets.part(b, 'usage'), unpack(args_of_usage))
  return reply.ok('released')
end, { 'allow-oom' })
