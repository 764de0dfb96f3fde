-- ff_budget_update: change limits and settings of a budget; its usage stays.
-- Keys: budget, limits, budget_resets, usage mark.
-- Arguments: budget_id, request id, then per change: name (a setting, or hard:<dimension> or
--   soft:<dimension>), value.
-- Replies: nothing. Errors: budget_not_found, invalid_input, corruption. Events: budget_updated.
local MAX_DIMENSIONS = 64

local function dimensions_after(b, limits)
  local seen, count = {}, 0
  local function note(field)
    local name = string.sub(field, 6)
    if not seen[name] then seen[name], count = true, count + 1 end
  end
  for field in pairs(budgets.limits(b)) do note(field) end
  for i = 1, #limits, 2 do note(limits[i]) end
  return count
end

budgets.register_function('ff_budget_update', function(b, args)
  local limits, settings, interval = {}, {}, nil
  for i = 3, #args, 2 do
    local name, value = args[i], args[i + 1]
    local fields = string.find(name, ':', 1, true) and limits or settings
    fields[#fields + 1], fields[#fields + 2] = name, value
    if name == 'reset_interval_ms' then interval = tonumber(value) end
  end
  local count = dimensions_after(b, limits)
  if count > MAX_DIMENSIONS then
    return reply.err('invalid_input',
      'too_many_dimensions: limit=' .. MAX_DIMENSIONS .. ', got=' .. count)
  end
  if #limits > 0 then server.call('HSET', budgets.part(b, 'limits'), unpack(limits)) end
  if #settings > 0 then budgets.set(b, unpack(settings)) end
  if interval then budgets.schedule(b, interval > 0 and clock.after(b.now, interval) or 0) end
  local changes = values.slice(args, 3, #args)
  events.emit_operator(b.tag, b.now, 'budget_updated', 'budget_id', b.id, unpack(changes))
  return reply.ok()
end, { 'allow-oom' })
