-- ff_budget_reset: set all usage of a budget to 0; a recurring reset starts over from now.
-- Keys: budget, usage, budget_resets, usage mark. Arguments: budget_id, request id.
-- Replies: next_reset_at, 0 for none. Errors: budget_not_found, corruption. Events: budget_reset.
budgets.register_function('ff_budget_reset', function(b)
  local interval = budgets.number(b, 'reset_interval_ms')
  local next_at = interval > 0 and clock.after(b.now, interval) or 0
  budgets.reset(b, next_at)
  return reply.ok(next_at)
end, { 'allow-oom' })
