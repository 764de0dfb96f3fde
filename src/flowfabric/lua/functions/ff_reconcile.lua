-- ff_reconcile: compare executions with the indexes their records demand; repair on request.
-- Keys: core, suspension, every lane index, lease_expiry, suspension_timeout, all_executions.
-- Arguments: check | repair, then execution ids.
-- Replies per id: consistent | drifted:<expected> | repaired:<from>><to> | orphan | orphan_removed |
--   error:<why>.
-- Errors: none. Events: none.
local LANE_INDEXES = {
  'delayed', 'active', 'suspended', 'terminal', 'blocked:dependencies',
  'blocked:budget', 'blocked:quota', 'blocked:route', 'blocked:operator', 'blocked:lane',
}

-- These are kept apart by what the executions require.
local BY_SIGNATURE = { eligible = K.eligible, reclaimable = K.reclaimable }

local function key_of(c, rec, suffix)
  local by_signature = BY_SIGNATURE[suffix]
  if by_signature then return by_signature(c.tag, rec.lane_id, rec.required_capabilities) end
  if suffix == 'lease_expiry' or suffix == 'suspension_timeout' then return K.index(c.tag, suffix) end
  return K.lane(c.tag, rec.lane_id, suffix)
end

local function group(groups, name, id)
  groups[name] = groups[name] or {}
  table.insert(groups[name], id)
end

local function note(found, key, suffix, ids)
  local scores = server.call('ZMSCORE', key, unpack(ids))
  for i, id in ipairs(ids) do
    if scores[i] then found[id][suffix] = true end
  end
end

-- Which indexes hold each record, by suffix; one command per index, not per record.
local function held_by(c, ids, records)
  local found, known, lanes = {}, {}, {}
  local apart = { eligible = {}, reclaimable = {} }
  for _, id in ipairs(ids) do
    local rec = records[id]
    if rec and not found[id] then
      found[id] = {}
      known[#known + 1] = id
      group(lanes, rec.lane_id, id)
      for suffix, groups in pairs(apart) do group(groups, key_of(c, rec, suffix), id) end
    end
  end
  if #known == 0 then return found end
  for _, timer in ipairs({ 'lease_expiry', 'suspension_timeout' }) do
    note(found, K.index(c.tag, timer), timer, known)
  end
  for suffix, groups in pairs(apart) do
    for key, members in pairs(groups) do note(found, key, suffix, members) end
  end
  for lane, members in pairs(lanes) do
    for _, suffix in ipairs(LANE_INDEXES) do
      note(found, K.lane(c.tag, lane, suffix), suffix, members)
    end
  end
  return found
end

-- When the open suspension of a suspended record times out, or nil.
local function suspension_timeout(c, id)
  local found = server.call('HMGET', K.suspension(c.tag, id), 'timeout_at', 'closed_at')
  return not found[2] and tonumber(found[1]) or nil
end

local function demanded(c, id, rec)
  local suffix = S.index_suffix(rec.state)
  local want = { [suffix] = true }
  if suffix == 'active' then
    want[S.ownership(rec.state) == 'l' and 'lease_expiry' or 'reclaimable'] = true
  elseif suffix == 'suspended' and suspension_timeout(c, id) then
    want.suspension_timeout = true
  end
  return want, suffix
end

local function add(c, id, rec, suffix)
  if suffix == 'eligible' or suffix == 'delayed' or string.find(suffix, '^blocked') then
    waiting.enter(c, id, rec)
  elseif suffix == 'reclaimable' then
    lease.enter_reclaimable(c, id, rec)
  elseif suffix == 'lease_expiry' or suffix == 'active' then
    c:zadd(key_of(c, rec, suffix), tonumber(rec.lease_expires_at), id)
  elseif suffix == 'suspended' then
    waiting.enter(c, id, rec, suspension.score(suspension_timeout(c, id)))
  elseif suffix == 'suspension_timeout' then
    c:zadd(key_of(c, rec, suffix), suspension_timeout(c, id), id)
  elseif suffix == 'terminal' then
    c:zadd(key_of(c, rec, suffix), ending.purge_due(rec, tonumber(rec.completed_at)), id)
  end
end

local function names(set)
  local list = {}
  for name in pairs(set) do list[#list + 1] = name end
  table.sort(list)
  return #list > 0 and table.concat(list, '+') or 'none'
end

local function reconcile(c, id, rec, found, repair)
  if not rec then
    if not repair then return 'orphan' end
    c:zrem(K.index(c.tag, 'all_executions'), id)
    return 'orphan_removed'
  end
  local want = demanded(c, id, rec)
  if names(found) == names(want) then return 'consistent' end
  if not repair then return 'drifted:' .. names(want) end
  for suffix in pairs(found) do
    if not want[suffix] then c:zrem(key_of(c, rec, suffix), id) end
  end
  for suffix in pairs(want) do
    if not found[suffix] then add(c, id, rec, suffix) end
  end
  if want.eligible or want.reclaimable then c:ring(rec.lane_id) end
  return 'repaired:' .. names(found) .. '>' .. names(want)
end

local function reconcile_some(c, ids, repair)
  local records, broken = {}, {}
  local problems = batch.each(ids, 1, function(id)
    records[id] = record.read(c, id)
    return false
  end)
  for i, id in ipairs(ids) do broken[id] = problems[i] end
  local found = held_by(c, ids, records)
  local answers = batch.each(ids, 1, function(id)
    return broken[id] or reconcile(c, id, records[id], found[id], repair)
  end)
  return answers
end

register('ff_reconcile', function(keys, args)
  local c = Context.open(keys[1])
  local replies = {}
  for first = 2, #args, MAX_ARGS do
    local ids = { unpack(args, first, math.min(first + MAX_ARGS - 1, #args)) }
    for _, answer in ipairs(reconcile_some(c, ids, args[1] == 'repair')) do
      replies[#replies + 1] = answer
    end
  end
  return reply.ok(replies)
end)
