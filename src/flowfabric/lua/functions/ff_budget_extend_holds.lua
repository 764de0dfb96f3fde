-- ff_budget_extend_holds: let the holds of an execution last as long as its renewed lease.
-- Keys: budget, holds, holders, hold_expiry.
-- Arguments: budget_id, execution_id, lease epoch, lease expiry (ms). Replies: how many holds.
-- Errors: corruption. Events: none.
budgets.register_step('ff_budget_extend_holds', 0, function(b, args)
  local epoch, count = tonumber(args[3]), 0
  for _, hold in ipairs(budgets.holds_of(b, args[2], epoch)) do
    if hold.epoch == epoch then
      hold.expires_at = math.max(hold.expires_at, budgets.hold_end(hold, tonumber(args[4])))
      budgets.store_hold(b, hold)
      count = count + 1
    end
  end
  return reply.ok(count)
end, { 'allow-oom' })
