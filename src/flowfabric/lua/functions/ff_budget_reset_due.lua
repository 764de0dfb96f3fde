-- ff_budget_reset_due: reset the budgets whose period is over. Missed periods count as one.
-- Keys: budget, usage, budget_resets. Arguments: any number of budget_ids.
-- Replies per budget: reset | not_due | removed | error:<why>. Errors: none. Events: budget_reset.
local function reset(tag, id)
  if not string.find(id, '^%x+-%x+-%x+-%x+-%x+$') then error('is not a budget id', 0) end
  local b = budgets.read(tag, id)
  local due = b and budgets.number(b, 'next_reset_at') or 0
  if due == 0 then
    server.call('ZREM', K.index(tag, 'budget_resets'), id)
    return 'removed'
  end
  if due > b.now then return 'not_due' end
  local interval = budgets.number(b, 'reset_interval_ms')
  -- From the planned time, not from now: the schedule does not drift.
  budgets.reset(b, clock.after(due, (math.floor((b.now - due) / interval) + 1) * interval))
  return 'reset'
end

register('ff_budget_reset_due', function(keys, args)
  return reply.ok(batch.each(args, 1, function(id) return reset(keys[1], id) end))
end, { 'allow-oom' })
