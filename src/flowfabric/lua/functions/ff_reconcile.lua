-- ff_reconcile: compare executions with the indexes that their records demand; repair on request.
-- Keys: core, suspension, every lane index, timers, worker leases, all_executions, events.
-- Arguments: check | repair, number of lanes, then the lanes whose indexes are searched for
--   entries that do not belong there (those of the records always are), then execution ids.
-- Replies: per id consistent | drifted:<its lane index> <wrong>><missing> |
--   repaired:<wrong>><missing> | orphan | orphan_removed | error:<why>; then the lanes that the
--   records name. Errors: none. Events: none; rings the doorbell.

-- For an index whose score is not on the record.
local ANY = 'any'
-- How many entries of the feed are searched for workers that may have held a missing execution.
local FEED = 1000

-- The attempt's timer: the score, or the times between which it lies.
local function attempt_timer(id, rec)
  local timeout = tonumber(rec.attempt_timeout_ms or 0)
  if timeout <= 0 then return nil end
  local from = tonumber(rec.resumed_at or rec.attempt_started_at or rec.started_at)
  if not from then error(id .. ': started_at: is missing', 0) end
  local due = clock.after(from, timeout)
  -- A resumed attempt has what it had left, which is at most the whole timeout.
  return rec.resumed_at and { after = from, due = due } or due
end

-- The score of claimable work; any while a lane here gets new ones.
local function order_score(c, rec)
  if c.rescoring == nil then
    c.rescoring = server.call('EXISTS', K.index(c.tag, 'rescore')) == 1
  end
  local score = tonumber(c:score(rec))
  return c.rescoring and { after = -math.huge, due = math.huge, right = score } or score
end

local function demand_lease(c, id, rec, want)
  local expires = tonumber(rec.lease_expires_at) or ANY
  want[K.lane(c.tag, rec.lane_id, 'active')] = expires
  if S.is_leased(rec.state) then
    want[K.index(c.tag, 'lease_expiry')] = expires
  else
    want[K.reclaimable(c.tag, rec.lane_id, waiting.signature(rec))] = order_score(c, rec)
  end
  if S.is_leased(rec.state) or S.is_lease_expired(rec.state) then
    want[K.worker_leases(c.tag, record.worker_instance(rec))] = true
  end
  want[K.index(c.tag, 'attempt_timeout')] = attempt_timer(id, rec)
end

-- The keys that must hold the execution, each with its score (true: a plain set), and the suffix of
-- its one lane index.
local function demanded(c, id, rec)
  local suffix = S.index_suffix(rec.state)
  local key, want = K.lane(c.tag, rec.lane_id, suffix), { [K.index(c.tag, 'all_executions')] = 0 }
  if suffix == 'active' then
    demand_lease(c, id, rec, want)
  elseif suffix == 'eligible' then
    want[K.eligible(c.tag, rec.lane_id, waiting.signature(rec))] = order_score(c, rec)
  elseif suffix == 'delayed' then
    want[key] = tonumber(rec.delay_until) or ANY
  elseif suffix == 'suspended' then
    local found = server.call('HMGET', K.suspension(c.tag, id), 'timeout_at', 'closed_at')
    local timeout = not found[2] and tonumber(found[1]) or nil
    want[key] = suspension.score(timeout)
    want[K.index(c.tag, 'suspension_timeout')] = timeout
  elseif suffix == 'terminal' then
    want[key] = ending.purge_due(id, rec)
  else
    want[key] = suffix == 'blocked:dependencies' and tonumber(rec.created_at) or ANY
  end
  if suffix ~= 'terminal' and rec.execution_deadline_at then
    want[K.index(c.tag, 'execution_deadline')] = tonumber(rec.execution_deadline_at)
  end
  return want, suffix
end

local function fits(held, wanted)
  if not held or wanted == ANY then return held ~= nil end
  if type(wanted) == 'table' then return held > wanted.after and held <= wanted.due end
  return held == wanted
end

-- Notes for every id of the piece whether a key holds it, and with which score. An unreadable key
-- only fails the executions that must be in it.
local function look_into(piece, key, command)
  if piece.looked[key] then return end
  piece.looked[key] = true
  local ok, answers = try(server.call, command, key, unpack(piece.ids))
  if not ok then
    piece.unreadable[key] = answers
    return
  end
  for i, id in ipairs(piece.ids) do
    if command == 'ZMSCORE' then
      if answers[i] then piece.held[id][key] = tonumber(answers[i]) end
    elseif answers[i] == 1 then
      piece.held[id][key] = true
    end
  end
end

-- `own`: the signatures of the records, which a lane with very many may not show otherwise.
local function look_into_lane(c, piece, lane, own)
  local names, sigs = {}, K.lane(c.tag, lane, 'sigs')
  local ok, signatures = try(waiting.signatures, sigs, own)
  if not ok then piece.unreadable[sigs], signatures = signatures, {} end
  for _, signature in ipairs(signatures) do
    local eligible = K.eligible(c.tag, lane, signature)
    piece.signatures[eligible] = { lane, signature }
    values.append(names, { eligible, K.reclaimable(c.tag, lane, signature) })
  end
  indexes.add_lane(names, c.tag, lane)
  names[#names] = nil
  for _, key in ipairs(indexes.existing(names)) do look_into(piece, key, 'ZMSCORE') end
end

-- Workers that claimed something lately: their sets may hold executions without a record.
local function add_recent_workers(c, instances)
  local ok, entries = try(server.call, 'XREVRANGE', K.events(c.tag), '+', '-', 'COUNT', FEED)
  for _, entry in ipairs(ok and entries or {}) do
    local worker = values.fields(entry[2]).w
    if worker then instances[record.instance_of(worker)] = true end
  end
end

-- Reads the records, then every key that could hold them: a command per key, not per record.
local function read(c, piece, lanes, seen)
  local here, instances, orphans = {}, {}, false
  for lane in pairs(lanes) do here[lane] = {} end
  local problems = batch.each(piece.ids, 1, function(id)
    piece.held[id] = {}
    local rec = record.checked_lease(c, id)
    piece.records[id] = rec
    if rec then
      here[rec.lane_id], seen[rec.lane_id] = here[rec.lane_id] or {}, true
      table.insert(here[rec.lane_id], waiting.signature(rec))
      if rec.worker then instances[record.worker_instance(rec)] = true end
    else
      orphans = true
    end
    return false
  end)
  for i, id in ipairs(piece.ids) do piece.broken[id] = problems[i] end
  look_into(piece, K.index(c.tag, 'all_executions'), 'ZMSCORE')
  for _, timer in ipairs(indexes.TIMERS) do look_into(piece, K.index(c.tag, timer), 'ZMSCORE') end
  for lane, own in pairs(here) do look_into_lane(c, piece, lane, own) end
  for _, rec in pairs(piece.records) do
    -- The lane may not know the signature.
    local signature = waiting.signature(rec)
    if signature then
      look_into(piece, K.eligible(c.tag, rec.lane_id, signature), 'ZMSCORE')
      look_into(piece, K.reclaimable(c.tag, rec.lane_id, signature), 'ZMSCORE')
    end
  end
  if piece.repair and orphans then add_recent_workers(c, instances) end
  for instance in pairs(instances) do
    look_into(piece, K.worker_leases(c.tag, instance), 'SMISMEMBER')
  end
end

local function labels(c, rec, keys)
  local list, own = {}, 'lane:' .. K.lane_part(rec.lane_id) .. ':'
  for i, key in ipairs(keys) do
    local name = string.sub(key, #K.index(c.tag, '') + 1)
    list[i] = string.sub(name, 1, #own) == own and string.sub(name, #own + 1) or name
  end
  table.sort(list)
  return #list > 0 and table.concat(list, '+') or 'none'
end

local function leave(c, piece, id, key)
  if piece.held[id][key] == true then c:srem(key, id) else c:zrem(key, id) end
end

local function enter(c, id, rec, key, wanted)
  if key == K.lane(c.tag, rec.lane_id, 'sigs') then
    c:sadd(key, waiting.signature(rec))
  elseif wanted == true then
    c:sadd(key, id)
  else
    c:zadd(key, wanted == ANY and c.now or type(wanted) == 'table' and (wanted.right or wanted.due) or wanted, id)
  end
end

local function must_be_readable(piece, id, key)
  local why = piece.unreadable[key]
  if why then error(id .. ': ' .. key .. ': ' .. why, 0) end
end

local function is_claimable(rec, suffix)
  return suffix == 'eligible' or (suffix == 'active' and not S.is_leased(rec.state))
end

local function compare(c, piece, id, rec, want, suffix)
  local held, wrong, missing = piece.held[id], {}, {}
  for key, wanted in pairs(want) do
    must_be_readable(piece, id, key)
    if not fits(held[key], wanted) then missing[#missing + 1] = key end
  end
  for key in pairs(held) do
    if want[key] == nil or not fits(held[key], want[key]) then wrong[#wrong + 1] = key end
  end
  local signature = is_claimable(rec, suffix) and waiting.signature(rec)
  if signature and not piece.signatures[K.eligible(c.tag, rec.lane_id, signature)] then
    must_be_readable(piece, id, K.lane(c.tag, rec.lane_id, 'sigs'))
    missing[#missing + 1] = K.lane(c.tag, rec.lane_id, 'sigs')
  end
  return wrong, missing
end

local function verdict(c, piece, id)
  if piece.broken[id] then return piece.broken[id] end
  local rec = piece.records[id]
  if not rec then
    if not next(piece.held[id]) then return 'consistent' end
    if not piece.repair then return 'orphan' end
    for key in pairs(piece.held[id]) do leave(c, piece, id, key) end
    return 'orphan_removed'
  end
  local want, suffix = demanded(c, id, rec)
  local wrong, missing = compare(c, piece, id, rec, want, suffix)
  if #wrong + #missing == 0 then return 'consistent' end
  local drift = labels(c, rec, wrong) .. '>' .. labels(c, rec, missing)
  if not piece.repair then return 'drifted:' .. suffix .. ' ' .. drift end
  for _, key in ipairs(wrong) do
    if want[key] == nil then leave(c, piece, id, key) end
  end
  for _, key in ipairs(missing) do enter(c, id, rec, key, want[key]) end
  if is_claimable(rec, suffix) then waiting.ring(c, rec) end
  return 'repaired:' .. drift
end

register('ff_reconcile', function(keys, args)
  local c = Context.open(keys[1])
  local lanes, seen, replies, names, count = {}, {}, {}, {}, tonumber(args[2])
  for i = 3, 2 + count do lanes[args[i]] = true end
  for first, last in values.pieces(args, 3 + count) do
    local piece = {
      ids = values.slice(args, first, last), repair = args[1] == 'repair', records = {},
      broken = {}, held = {}, signatures = {}, looked = {}, unreadable = {},
    }
    read(c, piece, lanes, seen)
    values.append(replies, batch.each(piece.ids, 1, function(id) return verdict(c, piece, id) end))
    for _, stored in pairs(piece.repair and piece.signatures or {}) do
      c:release_signature(stored[1], stored[2])
    end
  end
  for lane in pairs(seen) do names[#names + 1] = lane end
  return reply.ok(replies, names)
end, { 'allow-oom' })
