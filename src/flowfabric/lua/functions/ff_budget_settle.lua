-- ff_budget_settle: turn a hold into usage. What exceeds the hold is counted like any usage, if it
-- fits beside the holds of others; a dimension that is not named settles at what was held.
-- Keys: budget, limits, usage, reserved, holds, holders, hold_expiry, settled, usage mark.
-- Arguments: budget_id, request id, reservation_id, then per dimension: name, actual.
-- Replies: ok | already_applied | soft_breach, dimension, usage, limit, action | hard_breach,
--   dimension, usage, limit, action, reserved.
-- Errors: budget_not_found, reservation_not_found, invalid_input, corruption.
-- Events: budget_breached.

-- What the hold covers of each dimension, and what exceeds it.
local function divided(hold, actual)
  local covered, excess = { names = {}, deltas = {} }, { names = {}, deltas = {} }
  local function divide(name, amount)
    local held = hold.deltas[name] or 0
    covered.names[#covered.names + 1] = name
    covered.deltas[name] = math.min(amount, held)
    if amount > held then
      excess.names[#excess.names + 1] = name
      excess.deltas[name] = amount - held
    end
  end
  for _, name in ipairs(actual.names) do divide(name, actual.deltas[name]) end
  for name, held in pairs(hold.deltas) do
    if not actual.deltas[name] then divide(name, held) end
  end
  table.sort(covered.names)
  return covered, excess
end

local function joined(covered, excess)
  for name, more in pairs(excess.deltas) do covered.deltas[name] = covered.deltas[name] + more end
  return covered
end

budgets.register_function('ff_budget_settle', function(b, args)
  local hold = budgets.hold(b, args[3])
  if not hold then
    local ended = budgets.ended_hold(b, args[3])
    if ended and ended.how == 'settled' then return reply.ok('already_applied') end
    return reply.err('reservation_not_found')
  end
  local covered, excess = divided(hold, budgets.spend(args, 4))
  local limits, usage, reserved = budgets.limits(b), budgets.usage(b), budgets.reserved(b)
  local taken = {}
  for name, amount in pairs(usage) do taken[name] = amount end
  for name, amount in pairs(covered.deltas) do
    taken[name] = (taken[name] or 0) + amount
    -- No other hold may lose its room to an excess; this one's own is free now.
    taken[name] = taken[name] - (hold.deltas[name] or 0)
  end
  local above = budgets.first_above(excess, limits, taken, reserved)
  local stopped = budgets.stops(b, above, excess, usage)
  budgets.drop_hold(b, hold, reserved)
  budgets.end_hold(b, hold, 'settled')
  if not stopped then return budgets.apply(b, joined(covered, excess), limits, usage, above) end
  budgets.apply(b, covered, limits, usage)
  return budgets.hard_breach(b, above, usage[above] or 0, limits['hard:' .. above],
    reserved[above] or 0)
end, { 'allow-oom' })
