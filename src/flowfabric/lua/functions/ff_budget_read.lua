-- ff_budget_read: budgets with all that they count, each as of one moment.
-- Keys: budget, limits, usage, reserved. Arguments: any number of budget_ids.
-- Replies per budget: flat definition, flat limits, flat usage, flat reserved; empty if there is
--   none; or error:<why>. Errors: none.
local function row(tag, id)
  local flat = server.call('HGETALL', K.budget(tag, id))
  if #flat == 0 then return {} end
  local found = { flat }
  for _, part in ipairs({ 'limits', 'usage', 'reserved' }) do
    found[#found + 1] = server.call('HGETALL', K.budget_part(tag, id, part))
  end
  return found
end

register('ff_budget_read', function(keys, args)
  return reply.ok(batch.each(args, 1, function(id) return row(keys[1], id) end))
end, { 'no-writes' })
