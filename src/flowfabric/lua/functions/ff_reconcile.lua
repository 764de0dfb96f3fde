-- ff_reconcile: compare executions with the indexes their records demand; repair on request.
-- Keys: core, every lane index, lease_expiry, all_executions.
-- Arguments: check | repair, then execution ids.
-- Replies per id: consistent | drifted:<expected> | repaired:<from>><to> | orphan | orphan_removed.
-- Errors: none. Events: none.
local LANE_INDEXES = {
  'delayed', 'active', 'reclaimable', 'suspended', 'terminal', 'blocked:dependencies',
  'blocked:budget', 'blocked:quota', 'blocked:route', 'blocked:operator', 'blocked:lane',
}
local DEFAULT_RETENTION_MS = 86400000

local function eligible_key(c, rec) return K.eligible(c.tag, rec.lane_id, rec.required_capabilities) end

local function has(key, id) return server.call('ZSCORE', key, id) ~= false end

-- Which indexes hold it, by suffix.
local function held_by(c, id, rec)
  local found = {}
  if has(eligible_key(c, rec), id) then found.eligible = true end
  for _, suffix in ipairs(LANE_INDEXES) do
    if has(K.lane(c.tag, rec.lane_id, suffix), id) then found[suffix] = true end
  end
  if has(K.index(c.tag, 'lease_expiry'), id) then found.lease_expiry = true end
  return found
end

local function demanded(rec)
  local suffix = S.index_suffix(rec.state)
  local want = { [suffix] = true }
  if suffix == 'active' then
    want[S.ownership(rec.state) == 'l' and 'lease_expiry' or 'reclaimable'] = true
  end
  return want, suffix
end

local function add(c, id, rec, suffix)
  if suffix == 'eligible' or suffix == 'delayed' or string.find(suffix, '^blocked') then
    waiting.enter(c, id, rec)
  elseif suffix == 'reclaimable' then
    c:zadd(K.lane(c.tag, rec.lane_id, suffix), c:score(rec), id)
  elseif suffix == 'lease_expiry' then
    c:zadd(K.index(c.tag, suffix), tonumber(rec.lease_expires_at), id)
  elseif suffix == 'active' then
    c:zadd(K.lane(c.tag, rec.lane_id, suffix), tonumber(rec.lease_expires_at), id)
  elseif suffix == 'terminal' then
    c:zadd(K.lane(c.tag, rec.lane_id, suffix),
      tonumber(rec.completed_at) + tonumber(rec.retention_ms or DEFAULT_RETENTION_MS), id)
  end
end

local function remove(c, id, rec, suffix)
  if suffix == 'eligible' then
    c:zrem(eligible_key(c, rec), id)
  elseif suffix == 'lease_expiry' then
    c:zrem(K.index(c.tag, suffix), id)
  else
    c:zrem(K.lane(c.tag, rec.lane_id, suffix), id)
  end
end

local function names(set)
  local list = {}
  for name in pairs(set) do list[#list + 1] = name end
  table.sort(list)
  return #list > 0 and table.concat(list, '+') or 'none'
end

local function reconcile(c, id, repair)
  local rec = record.read(c, id)
  if not rec then
    if not repair then return 'orphan' end
    c:zrem(K.index(c.tag, 'all_executions'), id)
    return 'orphan_removed'
  end
  local found, want = held_by(c, id, rec), demanded(rec)
  if names(found) == names(want) then return 'consistent' end
  if not repair then return 'drifted:' .. names(want) end
  for suffix in pairs(found) do
    if not want[suffix] then remove(c, id, rec, suffix) end
  end
  for suffix in pairs(want) do
    if not found[suffix] then add(c, id, rec, suffix) end
  end
  c:flush()
  if want.eligible or want.reclaimable then c:ring(rec.lane_id) end
  return 'repaired:' .. names(found) .. '>' .. names(want)
end

server.register_function('ff_reconcile', function(keys, args)
  local c = Context.open(keys[1])
  local replies = {}
  for i = 2, #args do replies[i - 1] = reconcile(c, args[i], args[1] == 'repair') end
  c:flush()
  return reply.ok(replies)
end)
