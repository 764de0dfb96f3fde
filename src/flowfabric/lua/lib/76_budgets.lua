-- Budgets. One is a hash with its definition and, under the same hash tag, its limits, its usage,
-- what is held of it, and who holds it. Dimensions are at most 64 per hash, so each is read whole.

-- How long the answer to a call is kept, for a repeat after a lost reply.
local ANSWER_MS = 60000
local BREACH_EVENT_MS = 60000
local MAX_DIMENSIONS = 64
local NO_LIMIT = 0

local function corrupt(id, field, problem) error(id .. ': ' .. field .. ': ' .. problem, 0) end

-- The numbers of a hash by field; anything else stops the call.
local function numbers(b, part)
  local found = {}
  local flat = server.call('HGETALL', K.budget_part(b.tag, b.id, part))
  for i = 1, #flat, 2 do
    if not string.find(flat[i + 1], '^%d+$') then
      corrupt(b.id, part .. '.' .. flat[i], 'is not a whole number')
    end
    found[flat[i]] = tonumber(flat[i + 1])
  end
  return found
end

local function names_in(fields)
  local names = {}
  for name in pairs(fields) do names[#names + 1] = name end
  table.sort(names)
  return names
end

-- A field of the definition as a number; a missing one is 0.
function budgets.number(b, name)
  local value = b.def[name]
  if value and not string.find(value, '^%d+$') then corrupt(b.id, name, 'is not a whole number') end
  return tonumber(value or 0)
end

-- The budget, or nil if there is none.
function budgets.read(tag, id)
  local flat = server.call('HGETALL', K.budget(tag, id))
  if #flat == 0 then return nil end
  local b = { tag = tag, id = id, key = K.budget(tag, id), now = clock.now(), def = values.fields(flat) }
  b.strict = b.def.enforcement_mode ~= 'warn'
  return b
end

function budgets.part(b, part) return K.budget_part(b.tag, b.id, part) end
function budgets.limits(b) return numbers(b, 'limits') end
function budgets.usage(b) return numbers(b, 'usage') end
function budgets.reserved(b) return numbers(b, 'reserved') end
function budgets.dedup_ms(b) return budgets.number(b, 'dedup_ttl_ms') end
-- A ledger belongs to the time between two resets.
function budgets.period(b) return b.def.incarnation .. '/' .. (b.def.reset_count or '0') end

-- The reply to an earlier call with this request, or `already_applied` if another request used the key.
local function known(tag, id, key, request, incarnation)
  local packed = server.call('GET', K.usage_mark(tag, id, key))
  if not packed then return nil end
  local mark = cmsgpack.unpack(packed)
  if mark.request == request then return mark.answer end
  -- The marks of a deleted budget outlive it.
  return mark.incarnation == incarnation and reply.ok('already_applied') or nil
end

function budgets.remember(tag, id, key, request, answer, ttl, incarnation)
  local mark = { request = request, answer = answer, incarnation = incarnation }
  server.call('SET', K.usage_mark(tag, id, key), cmsgpack.pack(mark), 'PX', values.text(ttl))
end

function budgets.applied_before(b, key, request)
  return key ~= '' and known(b.tag, b.id, key, request, b.def.incarnation) or nil
end

local function answer_once(tag, id, request, handle, args)
  local before = known(tag, id, request, request)
  if before then return before end
  local answer, noted = handle(tag, id, args)
  if answer[1] == 1 and not noted then
    budgets.remember(tag, id, request, request, answer, ANSWER_MS)
  end
  return answer
end

-- The reply of `handle(...)` about a budget; `corruption` if its keys cannot be read.
function budgets.guarded(id, ...)
  local ok, answer = try(...)
  if ok then return answer end
  local named = string.sub(answer, 1, #id + 2) == id .. ': '
  return reply.err('corruption', named and answer or id .. ': stored keys: ' .. answer)
end

-- Registers `handle(tag, id, args)` for the budget and the request that the first two arguments
-- name. A repeat of the request gets the same answer and has no second effect; `handle` may also
-- return that it has stored the answer itself.
function budgets.register_once(name, handle, flags)
  register(name, function(keys, args)
    return budgets.guarded(args[1], answer_once, keys[1], args[1], args[2], handle, args)
  end, flags)
end

-- `register_once` for budgets that exist: `handle(b, args)`.
function budgets.register_function(name, handle, flags)
  budgets.register_once(name, function(tag, id, args)
    local b = budgets.read(tag, id)
    if not b then return reply.err('budget_not_found') end
    return handle(b, args)
  end, flags)
end

-- Registers `handle(b, args)` for a repeatable step on the budget that the first argument names;
-- one that is gone answers `nothing`.
function budgets.register_step(name, nothing, handle, flags)
  register(name, function(keys, args)
    return budgets.guarded(args[1], function()
      local b = budgets.read(keys[1], args[1])
      return b and handle(b, args) or reply.ok(nothing)
    end)
  end, flags)
end

function budgets.set(b, ...) server.call('HSET', b.key, ...) end

-- Counts a hard breach, and reports it at most once a minute.
function budgets.breach(b, name, current, limit)
  budgets.set(b, 'breach_count', values.text(budgets.number(b, 'breach_count') + 1),
    'last_breach_at', values.text(b.now), 'last_breach_dim', name)
  if b.now - budgets.number(b, 'breach_event_at') < BREACH_EVENT_MS then return end
  budgets.set(b, 'breach_event_at', values.text(b.now))
  events.emit_operator(b.tag, b.now, 'budget_breached', 'budget_id', b.id, 'dimension', name,
    'current_usage', values.text(current), 'hard_limit', values.text(limit))
end

function budgets.soft_breach(b, name, current, limit)
  return reply.ok('soft_breach', name, current, limit, b.def.on_soft_limit or 'warn')
end

function budgets.hard_breach(b, name, current, limit, held)
  budgets.breach(b, name, current, limit)
  return reply.ok('hard_breach', name, current, limit, b.def.on_hard_limit or 'fail', held or 0)
end

-- Refuses amounts that the budget cannot count; returns the first dimension above its hard limit.
-- `held`: what others have reserved, if that counts.
function budgets.first_above(spend, limits, usage, held)
  local above, count, adds = nil, 0, false
  for _ in pairs(usage) do count = count + 1 end
  for name in pairs(held or {}) do
    if not usage[name] then count = count + 1 end
  end
  for _, name in ipairs(spend.names) do
    local hard = limits['hard:' .. name] or NO_LIMIT
    local sum = (usage[name] or 0) + (held and held[name] or 0) + spend.deltas[name]
    if hard > NO_LIMIT then
      if sum > hard then above = above or name end
    elseif sum > clock.END then
      reply.refuse('invalid_input', 'deltas: ' .. name .. ' would pass 2^53 - 1')
    end
    if not (usage[name] or held and held[name]) then count, adds = count + 1, true end
  end
  if adds and count > MAX_DIMENSIONS then
    reply.refuse('invalid_input', 'too_many_dimensions: limit=' .. MAX_DIMENSIONS .. ', got=' .. count)
  end
  return above
end

-- Whether a hard limit stops this spend. Without enforcement only what cannot be counted stops.
function budgets.stops(b, name, spend, usage)
  return name and (b.strict or (usage[name] or 0) + spend.deltas[name] > clock.END)
end

-- Adds the deltas to the usage and answers; `above` is what a budget without enforcement let pass.
function budgets.apply(b, spend, limits, usage, above)
  local args, soft = {}, nil
  for _, name in ipairs(spend.names) do
    usage[name] = (usage[name] or 0) + spend.deltas[name]
    args[#args + 1], args[#args + 2] = name, values.text(usage[name])
    local limit = limits['soft:' .. name] or NO_LIMIT
    if limit > NO_LIMIT and usage[name] > limit then soft = soft or name end
  end
  if #args > 0 then server.call('HSET', budgets.part(b, 'usage'), unpack(args)) end
  if above then
    local limit = limits['hard:' .. above]
    budgets.breach(b, above, usage[above], limit)
    return budgets.soft_breach(b, above, usage[above], limit)
  end
  if not soft then return reply.ok('ok') end
  budgets.set(b, 'soft_breach_count', values.text(budgets.number(b, 'soft_breach_count') + 1))
  return budgets.soft_breach(b, soft, usage[soft], limits['soft:' .. soft])
end

-- The amounts from argument `first` on: dimension, delta pairs without repeated dimensions.
function budgets.spend(args, first)
  local spend = { names = {}, deltas = {} }
  for i = first, #args, 2 do
    spend.names[#spend.names + 1] = args[i]
    spend.deltas[args[i]] = tonumber(args[i + 1])
  end
  return spend
end

-- Sets usage to 0 and begins a new period; the next reset is at `next_at`, 0 for none.
function budgets.reset(b, next_at)
  local args, count = {}, budgets.number(b, 'reset_count') + 1
  for _, name in ipairs(names_in(budgets.usage(b))) do
    args[#args + 1], args[#args + 2] = name, '0'
  end
  if #args > 0 then server.call('HSET', budgets.part(b, 'usage'), unpack(args)) end
  budgets.set(b, 'reset_count', values.text(count), 'last_reset_at', values.text(b.now))
  server.call('HDEL', b.key, 'last_breach_at', 'last_breach_dim', 'breached_at')
  budgets.schedule(b, next_at)
  events.emit_operator(b.tag, b.now, 'budget_reset', 'budget_id', b.id,
    'reset_count', values.text(count), 'next_reset_at', values.text(next_at))
end

function budgets.schedule(b, next_at)
  local index = K.index(b.tag, 'budget_resets')
  if next_at == 0 then
    server.call('ZREM', index, b.id)
    server.call('HDEL', b.key, 'next_reset_at')
  else
    server.call('ZADD', index, values.text(next_at), b.id)
    budgets.set(b, 'next_reset_at', values.text(next_at))
  end
end

-- The first hard dimension, by name, of which nothing is left: name, usage, limit.
function budgets.exhausted(b)
  local limits, usage, first = budgets.limits(b), budgets.usage(b), nil
  for field, limit in pairs(limits) do
    local name = limit > NO_LIMIT and string.match(field, '^hard:(.+)$')
    if name and (usage[name] or 0) >= limit and (not first or name < first) then first = name end
  end
  return first and { first, usage[first] or 0, limits['hard:' .. first] }
end

-- Deletes what remains of a deleted budget, some ledgers per call; returns whether all are gone.
local LEDGERS_AT_ONCE = 500
function budgets.purge(tag, id)
  server.call('UNLINK', K.budget_part(tag, id, 'blocked'))
  local index = K.budget_part(tag, id, 'by_exec:index')
  local ids = server.call('ZRANGE', index, 0, LEDGERS_AT_ONCE - 1)
  for _, execution_id in ipairs(ids) do server.call('UNLINK', K.ledger(tag, id, execution_id)) end
  if #ids > 0 then server.call('ZREM', index, unpack(ids)) end
  if #ids == LEDGERS_AT_ONCE then return false end
  server.call('ZREM', K.index(tag, 'budget_policies'), id)
  return true
end
