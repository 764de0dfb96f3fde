-- ff_budget_reserve: hold an amount of a budget for an execution until its lease ends.
-- Keys: budget, limits, usage, reserved, holds, holders, hold_expiry, settled, usage mark.
-- Arguments: budget_id, request id, reservation_id, execution_id, lease epoch, lease expiry (ms),
--   ttl ms or empty, then per dimension: name, delta.
-- Replies: reserved, then per dimension: name, held | soft_breach, dimension, usage, limit, action |
--   hard_breach, dimension, usage, limit, action, reserved.
-- Errors: budget_not_found, invalid_input, corruption. Events: budget_breached.
local FIRST = 8

local function first_soft(spend, limits, usage, reserved)
  for _, name in ipairs(spend.names) do
    local soft = limits['soft:' .. name] or 0
    if soft > 0 and (usage[name] or 0) + (reserved[name] or 0) > soft then return name, soft end
  end
end

local function answer_to(b, args, spend, limits, usage, reserved, above)
  if above then
    budgets.breach(b, above, usage[above] or 0, limits['hard:' .. above])
    return budgets.soft_breach(b, above, usage[above] or 0, limits['hard:' .. above])
  end
  local soft, limit = first_soft(spend, limits, usage, reserved)
  -- With the amounts: a repeat that asks for others gets what is held.
  if not soft then return reply.ok('reserved', unpack(args, FIRST)) end
  budgets.set(b, 'soft_breach_count', values.text(budgets.number(b, 'soft_breach_count') + 1))
  return budgets.soft_breach(b, soft, usage[soft] or 0, limit)
end

budgets.register_function('ff_budget_reserve', function(b, args)
  local id, execution_id, ttl = args[3], args[4], tonumber(args[7])
  local before = budgets.hold(b, id) or budgets.ended_hold(b, id)
  if before and before.execution_id ~= execution_id then
    return reply.err('invalid_input', 'reservation_id: belongs to another execution')
  end
  if before then return before.answer end
  local spend, limits, usage = budgets.spend(args, FIRST), budgets.limits(b), budgets.usage(b)
  local reserved = budgets.reserved(b)
  local above = budgets.first_above(spend, limits, usage, reserved)
  if budgets.stops(b, above, spend, usage) then
    return budgets.hard_breach(b, above, usage[above] or 0, limits['hard:' .. above],
      reserved[above] or 0)
  end
  for _, name in ipairs(spend.names) do
    reserved[name] = (reserved[name] or 0) + spend.deltas[name]
    server.call('HSET', budgets.part(b, 'reserved'), name, values.text(reserved[name]))
  end
  local hold = { id = id, execution_id = execution_id, epoch = tonumber(args[5]),
    deltas = spend.deltas, latest = ttl and clock.after(b.now, ttl) or clock.END }
  hold.expires_at = budgets.hold_end(hold, tonumber(args[6]))
  hold.answer = answer_to(b, args, spend, limits, usage, reserved, above)
  budgets.store_hold(b, hold)
  return hold.answer
end, { 'allow-oom' })
