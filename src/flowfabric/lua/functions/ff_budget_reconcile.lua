-- ff_budget_reconcile: mark budgets whose usage is above a limit, give back holds that are overdue,
-- and finish the deletion of budgets that are gone.
-- Keys: budget, limits, usage, reserved, holds, holders, hold_expiry, ledgers, budget_policies.
-- Arguments: any number of budget_ids.
-- Replies per budget: [marked | cleared | unchanged | skipped | gone | going, holds given back,
--   whether it has holders, whether it has ledgers] | error:<why>. Errors: none. Events: none.
local HOLDS_AT_ONCE = 100

local function is_above(b)
  local usage = budgets.usage(b)
  for field, limit in pairs(budgets.limits(b)) do
    local name = string.match(field, '^hard:(.+)$')
    if name and limit > 0 and (usage[name] or 0) > limit then return true end
  end
  return false
end

local function mark(b)
  if budgets.number(b, 'reset_interval_ms') > 0 then return 'skipped' end
  local above = is_above(b)
  if above == (b.def.breached_at ~= nil) then return 'unchanged' end
  if above then
    budgets.set(b, 'breached_at', values.text(b.now))
    return 'marked'
  end
  server.call('HDEL', b.key, 'breached_at')
  return 'cleared'
end

local function return_overdue(b)
  local due = server.call('ZRANGE', budgets.part(b, 'hold_expiry'), '-inf', values.text(b.now),
    'BYSCORE', 'LIMIT', 0, HOLDS_AT_ONCE)
  local reserved = #due > 0 and budgets.reserved(b)
  for _, id in ipairs(due) do
    local hold = budgets.hold(b, id)
    if hold then
      budgets.drop_hold(b, hold, reserved)
    else
      -- An entry without its hold would stop every later pass.
      server.call('ZREM', budgets.part(b, 'hold_expiry'), id)
    end
  end
  return #due
end

local function reconcile(tag, id)
  local b = budgets.read(tag, id)
  if not b then return { budgets.purge(tag, id) and 'gone' or 'going', 0, 0, 0 } end
  local word, returned = mark(b), return_overdue(b)
  return { word, returned, server.call('EXISTS', budgets.part(b, 'holders')),
    server.call('EXISTS', budgets.part(b, 'by_exec:index')) }
end

register('ff_budget_reconcile', function(keys, args)
  return reply.ok(batch.each(args, 1, function(id) return reconcile(keys[1], id) end))
end, { 'allow-oom' })
