-- ff_budget_exhausted: which budgets admit no work now.
-- On a single server one call may name many partitions; in a cluster each gets its own.
-- Keys: budget, limits, usage. Arguments: per partition: tag, number of budgets, their ids.
-- Replies per budget: open | missing | [dimension, usage, hard limit, name or empty, next reset ms or
--   empty] | error:<why>. Errors: none.

-- How people know a budget that is exhausted.
local function described(tag, id, found)
  local about = server.call('HMGET', K.budget(tag, id), 'scope_type', 'scope_id', 'next_reset_at')
  values.append(found, { about[1] == 'name' and about[2] or '', about[3] or '' })
  return found
end

local function state(tag, id)
  -- Not the whole definition: every claim of work that names a budget asks this.
  local found = server.call('HMGET', K.budget(tag, id), 'budget_id', 'enforcement_mode')
  if not found[1] then return 'missing' end
  if found[2] == 'warn' then return 'open' end
  local exhausted = budgets.exhausted({ tag = tag, id = id })
  return exhausted and described(tag, id, exhausted) or 'open'
end

register('ff_budget_exhausted', function(_, args)
  local answers = {}
  batch.each_place(args, 1, function(tag, ids)
    values.append(answers, batch.each(ids, 1, function(id) return state(tag, id) end))
  end)
  return reply.ok(answers)
end, { 'no-writes' })
