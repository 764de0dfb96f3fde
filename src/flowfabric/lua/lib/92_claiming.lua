-- Finding claimable executions of a lane and turning them into leases.
local claiming = {}

-- A live grant or a foreign requirement must not hide what stands behind it.
local LOOK_AHEAD = 16
local DEFAULT_RECLAIM_CAP = 1000

function claiming.offered(csv)
  local set = {}
  for token in string.gmatch(csv, '[^,]+') do set[token] = true end
  return set
end

-- The required tokens that are not offered, as a sorted CSV; nil when all are.
function claiming.missing(required, offered)
  if not required then return nil end
  local absent = {}
  for token in string.gmatch(required, '[^,]+') do
    if not offered[token] then absent[#absent + 1] = token end
  end
  if #absent == 0 then return nil end
  return table.concat(absent, ',')
end

local function append(candidates, key, limit)
  local found = server.call('ZRANGE', key, 0, limit - 1, 'WITHSCORES')
  for i = 1, #found, 2 do
    candidates[#candidates + 1] = { id = found[i], score = tonumber(found[i + 1]), key = key }
  end
  return #found > 0
end

-- Eligible and reclaimable executions this worker could take, best first.
function claiming.candidates(c, lane, offered, limit)
  local candidates = {}
  local sources = append(candidates, K.eligible(c.tag, lane), limit) and 1 or 0
  for _, signature in ipairs(server.call('SMEMBERS', K.lane(c.tag, lane, 'sigs'))) do
    if not claiming.missing(signature, offered) then
      if append(candidates, K.eligible(c.tag, lane, signature), limit) then
        sources = sources + 1
      else
        server.call('SREM', K.lane(c.tag, lane, 'sigs'), signature)
      end
    end
  end
  if append(candidates, K.lane(c.tag, lane, 'reclaimable'), limit) then sources = sources + 1 end
  if sources > 1 then
    table.sort(candidates, function(a, b)
      if a.score ~= b.score then return a.score < b.score end
      return a.id < b.id
    end)
  end
  return candidates
end

-- How an execution in this state can be taken, or nil when it cannot.
function claiming.mode(c, rec)
  if S.phase(rec.state) == 'r' and S.eligibility(rec.state) == 'e' then
    return S.attempt(rec.state) == 'i' and 'resumed' or 'fresh'
  end
  local ownership = S.ownership(rec.state)
  if ownership == 'v' then return 'reclaimed' end
  if ownership == 'x' then
    local grace = c:lane(rec.lane_id).reclaim_grace
    if tonumber(rec.lease_expires_at) + grace <= c.now then return 'reclaimed' end
  end
  return nil
end

function claiming.reclaim_cap(rec, fallback)
  return tonumber(rec.max_reclaim_count or fallback or DEFAULT_RECLAIM_CAP)
end

-- Ends an execution that lost its worker too often.
function claiming.end_at_cap(c, id, rec)
  ending.finish(c, id, rec, {
    outcome = 'f', reason = 'max_reclaims_exceeded',
    fields = { 'failure_reason', 'max_reclaims_exceeded', 'ended_by', 'reclaim_cap' },
  })
end

-- Opens the lease in the given mode, leaving every index of the old state.
function claiming.take(c, id, rec, mode, grant)
  if mode == 'reclaimed' then
    record.archive(c, id, rec, 'interrupted_reclaimed', {
      ended_at = c.now,
      failure_reason = S.ownership(rec.state) == 'v' and 'lease_revoked' or 'lease_expired',
    })
    lease.leave_indexes(c, id, rec)
    c:flush()
  else
    waiting.leave(c, id, rec)
    lease.drop_grant(c, id, rec)
  end
  lease.open(c, id, rec, mode, grant)
end

local MODE_LETTERS = { fresh = 'f', resumed = 'r', reclaimed = 'c' }

-- Everything a worker needs to run the claimed attempt, by position.
function claiming.row(c, id, rec, mode)
  return {
    id, MODE_LETTERS[mode], rec.execution_kind, rec.lease, rec.attempt,
    server.call('GET', K.payload(c.tag, id)), rec.payload_encoding or false,
    rec.attempt_type or false, rec.tagged and server.call('HGETALL', K.tags(c.tag, id)) or false,
    rec.namespace ~= 'default' and rec.namespace or false, tonumber(rec.lease_expires_at),
    tonumber(rec.attempt_timeout_ms) or false, rec.lane_id,
  }
end

local function replayed(c, want, ids)
  local rows = {}
  for id in string.gmatch(ids, '%S+') do
    local rec = record.read(c, id)
    if rec and rec.state == S.ACTIVE and tonumber(rec.lease_expires_at) > c.now
        and string.sub(rec.lease, 1, 32) == want.lease_prefix then
      local mode = rec.attempt_type == 'reclaim' and not rec.resumed_at and 'reclaimed'
        or rec.resumed_at and 'resumed' or 'fresh'
      rows[#rows + 1] = claiming.row(c, id, rec, mode)
    end
  end
  return rows
end

function claiming.remaining(c, lane, offered)
  local count = server.call('ZCARD', K.eligible(c.tag, lane))
    + server.call('ZCARD', K.lane(c.tag, lane, 'reclaimable'))
  for _, signature in ipairs(server.call('SMEMBERS', K.lane(c.tag, lane, 'sigs'))) do
    if not claiming.missing(signature, offered) then
      count = count + server.call('ZCARD', K.eligible(c.tag, lane, signature))
    end
  end
  return count
end

-- Claims up to want.max executions of a lane. A repeat of the same request gives
-- the same claims. Returns the rows and how many claimable ones stay behind.
function claiming.many(c, want)
  local offered = claiming.offered(want.capabilities)
  local memo = K.last_claim(c.tag, want.lane, string.match(want.worker, ' (.*)$'))
  local last = server.call('GET', memo)
  if last and string.sub(last, 1, 32) == want.lease_prefix then
    return replayed(c, want, string.sub(last, 34)), claiming.remaining(c, want.lane, offered)
  end
  local state = c:lane(want.lane).state
  if state == 'paused' or state == 'disabled' then return {}, 0 end
  local rows, ids = {}, {}
  for _, candidate in ipairs(claiming.candidates(c, want.lane, offered, want.max + LOOK_AHEAD)) do
    if #rows == want.max then break end
    local id = candidate.id
    local rec = record.read(c, id)
    local mode = rec and claiming.mode(c, rec)
    if not rec or not (mode or S.phase(rec.state) == 'a') then
      c:zrem(candidate.key, id)
    elseif mode and tonumber(rec.grant_expires_at or 0) < c.now
        and not claiming.missing(rec.required_capabilities, offered) then
      if mode == 'reclaimed'
          and tonumber(rec.lease_reclaim_count or 0) >= claiming.reclaim_cap(rec) then
        claiming.end_at_cap(c, id, rec)
      else
        local suffix = string.format('%04x', #rows)
        claiming.take(c, id, rec, mode, {
          lease_id = want.lease_prefix .. suffix, attempt_id = want.attempt_prefix .. suffix,
          worker = want.worker, ttl = want.ttl,
        })
        rows[#rows + 1] = claiming.row(c, id, rec, mode)
        ids[#ids + 1] = id
      end
    end
  end
  c:flush()
  if #ids > 0 then
    server.call('SET', memo, want.lease_prefix .. ' ' .. table.concat(ids, ' '), 'PX', want.ttl)
  end
  local left = claiming.remaining(c, want.lane, offered)
  if left > 0 and #rows > 0 then c:ring(want.lane) end
  return rows, left
end

-- Reads the claim arguments that start at `first`: lane, worker, capabilities CSV,
-- lease ttl, max, lease id prefix, attempt id prefix.
function claiming.wanted(args, first)
  return {
    lane = args[first], worker = args[first + 1], capabilities = args[first + 2],
    ttl = tonumber(args[first + 3]), max = tonumber(args[first + 4]),
    lease_prefix = args[first + 5], attempt_prefix = args[first + 6],
  }
end
