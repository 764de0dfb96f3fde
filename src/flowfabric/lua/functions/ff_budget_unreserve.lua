-- ff_budget_unreserve: give a whole hold back.
-- Keys: budget, reserved, holds, holders, hold_expiry, settled, usage mark.
-- Arguments: budget_id, request id, reservation_id. Replies: released | noop.
-- Errors: budget_not_found, corruption. Events: none.
budgets.register_function('ff_budget_unreserve', function(b, args)
  local hold = budgets.hold(b, args[3])
  if not hold then return reply.ok('noop') end
  budgets.drop_hold(b, hold, budgets.reserved(b))
  budgets.end_hold(b, hold, 'released')
  return reply.ok('released')
end, { 'allow-oom' })
