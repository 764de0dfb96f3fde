-- ff_budget_create: define a budget, once.
-- Keys: budget, limits, budget_policies, budget_resets, usage mark.
-- Arguments: budget_id, request id, scope_type, scope_id, enforcement_mode, on_hard_limit,
--   on_soft_limit, reset_interval_ms, dedup_ttl_ms, then per dimension: name, hard limit, soft
--   limit.
-- Replies: created | exists, whether it differs (0 | 1). Errors: corruption. Events: budget_created.
local function settings_of(args)
  return { scope_type = args[3], scope_id = args[4], enforcement_mode = args[5],
    on_hard_limit = args[6], on_soft_limit = args[7], reset_interval_ms = args[8],
    dedup_ttl_ms = args[9] }
end

local function limits_of(args)
  local limits = {}
  for i = 10, #args, 3 do
    values.append(limits, { 'hard:' .. args[i], args[i + 1], 'soft:' .. args[i], args[i + 2] })
  end
  return limits
end

local function differs(b, settings, limits)
  for name, value in pairs(settings) do
    if (b.def[name] or '') ~= value then return true end
  end
  local given, count = values.fields(limits), 0
  local stored = values.fields(server.call('HGETALL', budgets.part(b, 'limits')))
  for name, value in pairs(given) do
    if stored[name] ~= value then return true end
    count = count + 1
  end
  for _ in pairs(stored) do count = count - 1 end
  return count ~= 0
end

budgets.register_once('ff_budget_create', function(tag, id, args)
  local known, limits = budgets.read(tag, id), limits_of(args)
  -- Also for one that exists: a repeated call repairs a lost entry.
  server.call('ZADD', K.index(tag, 'budget_policies'), 0, id)
  if known then return reply.ok('exists', differs(known, settings_of(args), limits) and 1 or 0) end
  local now = clock.now()
  local b = { tag = tag, id = id, key = K.budget(tag, id), now = now }
  local fields = { 'budget_id', id, 'incarnation', args[2], 'breach_count', '0',
    'soft_breach_count', '0', 'created_at', values.text(now) }
  for name, value in pairs(settings_of(args)) do values.add(fields, name, value) end
  budgets.set(b, unpack(fields))
  if #limits > 0 then server.call('HSET', budgets.part(b, 'limits'), unpack(limits)) end
  local interval = tonumber(args[8])
  if interval > 0 then budgets.schedule(b, clock.after(now, interval)) end
  events.emit_operator(tag, now, 'budget_created', 'budget_id', id, 'scope_type', args[3],
    'scope_id', args[4], unpack(limits))
  return reply.ok('created')
end, {})
