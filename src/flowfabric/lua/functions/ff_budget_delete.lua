-- ff_budget_delete: delete a budget, but for the notes about those that wait for it, which its caller
-- lets go, and for some of many ledgers: ff_budget_reconcile deletes what is left.
-- Keys: all of the budget, budget_policies, budget_resets, usage mark.
-- Arguments: budget_id, request id. Replies: whether everything is gone (0 | 1).
-- Errors: budget_not_found, corruption. Events: budget_deleted.
local PARTS = { 'limits', 'usage', 'reserved', 'holds', 'holders', 'hold_expiry' }

budgets.register_function('ff_budget_delete', function(b)
  for _, part in ipairs(PARTS) do server.call('UNLINK', budgets.part(b, part)) end
  server.call('DEL', b.key)
  server.call('ZREM', K.index(b.tag, 'budget_resets'), b.id)
  events.emit_operator(b.tag, b.now, 'budget_deleted', 'budget_id', b.id)
  local awaited = server.call('EXISTS', budgets.part(b, 'blocked')) == 1
  return reply.ok(not awaited and budgets.purge(b.tag, b.id) and 1 or 0)
end, { 'allow-oom' })
