-- ff_hold_budget: note on a leased execution that it holds a budget, so that whatever ends its lease
-- gives the hold back. Keys: core. Arguments: execution_id, fence, budget_id.
-- Replies: lease_expires_at. Errors: execution_not_found, invalid_input and those of the fence.
-- Events: expired (a lapsed lease).
local MAX_HELD = 16

local function add(held, budget_id)
  local ids = {}
  for id in string.gmatch(held or '', '[^,]+') do
    if id == budget_id then return held end
    ids[#ids + 1] = id
  end
  if #ids >= MAX_HELD then
    reply.refuse('invalid_input', 'budget_id: an execution can hold at most ' .. MAX_HELD .. ' budgets')
  end
  ids[#ids + 1] = budget_id
  return table.concat(ids, ',')
end

record.register_function('ff_hold_budget', record.checked_lease, function(c, id, rec, args)
  reply.stop_with(fence.check(c, id, rec, args[2], false, true))
  local held = add(rec.held_budgets, args[3])
  if held ~= rec.held_budgets then record.set(c, id, rec, 'held_budgets', held) end
  return reply.ok(tonumber(rec.lease_expires_at))
end, { 'allow-oom' })
