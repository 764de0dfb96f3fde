-- ff_budget_return_holds: give back what an execution held under leases that have ended.
-- Keys: budget, reserved, holds, holders, hold_expiry.
-- Arguments: budget_id, execution_id, the last of these epochs. Replies: how many holds.
-- Errors: corruption. Events: none.
budgets.register_step('ff_budget_return_holds', 0, function(b, args)
  local holds, reserved = budgets.holds_of(b, args[2], tonumber(args[3])), budgets.reserved(b)
  for _, hold in ipairs(holds) do budgets.drop_hold(b, hold, reserved) end
  return reply.ok(#holds)
end, { 'allow-oom' })
