-- ff_budget_spend: count usage of all dimensions, or of none if one would pass its hard limit.
-- Keys: budget, limits, usage, ledger, ledger index, usage mark.
-- Arguments: budget_id, request id, dedup key or empty, execution_id (its ledger gets the deltas) or
--   empty, then per dimension: name, delta.
-- Replies: ok | already_applied | soft_breach, dimension, usage, limit, action | hard_breach,
--   dimension, usage, limit, action, 0. Errors: budget_not_found, invalid_input, corruption.
-- Events: budget_breached.
local function note_in_ledger(b, execution_id, spend)
  local ledger, period = K.ledger(b.tag, b.id, execution_id), budgets.period(b)
  if server.call('HGET', ledger, '_period') ~= period then
    server.call('DEL', ledger)
    server.call('HSET', ledger, '_period', period)
    server.call('ZADD', budgets.part(b, 'by_exec:index'), 0, execution_id)
  end
  for _, name in ipairs(spend.names) do
    server.call('HINCRBY', ledger, name, values.text(spend.deltas[name]))
  end
end

budgets.register_function('ff_budget_spend', function(b, args)
  local request, dedup, execution_id = args[2], args[3], args[4]
  local before = budgets.applied_before(b, dedup, request)
  if before then return before, true end
  local spend, limits, usage = budgets.spend(args, 5), budgets.limits(b), budgets.usage(b)
  local above = budgets.first_above(spend, limits, usage)
  if budgets.stops(b, above, spend, usage) then
    return budgets.hard_breach(b, above, usage[above] or 0, limits['hard:' .. above])
  end
  if execution_id ~= '' then note_in_ledger(b, execution_id, spend) end
  local answer = budgets.apply(b, spend, limits, usage, above)
  if dedup == '' then return answer end
  budgets.remember(b.tag, b.id, dedup, request, answer, budgets.dedup_ms(b), b.def.incarnation)
  return answer, true
end, { 'allow-oom' })
