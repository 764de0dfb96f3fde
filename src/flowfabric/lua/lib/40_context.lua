-- One call's context: partition, time, lane settings, and index changes. A call for many
-- executions joins these into one command per index and writes them after the records.
local Context = {}
Context.__index = Context

-- Lua's unpack puts every argument on its stack; larger batches go in pieces.
local MAX_ARGS = 400

-- `joined` is for calls that may handle several executions.
function Context.open(tag, joined)
  return setmetatable({ tag = tag, now = clock.now(), joined = joined }, Context)
end

-- The time that many ms from now.
function Context:after(ms) return clock.after(self.now, ms) end

-- A time as text. The server would turn the number into text anew for every command.
function Context:text(ms)
  local texts = self.texts
  if not texts then
    texts = {}
    self.texts = texts
  end
  local known = texts[ms]
  if not known then
    known = string.format('%d', ms)
    texts[ms] = known
  end
  return known
end

-- The arguments queued for one command and key.
local function queue(self, command, key)
  local by_key = self[command]
  if not by_key then
    by_key = {}
    self[command] = by_key
    self.order = self.order or {}
  end
  local args = by_key[key]
  if not args then
    args = { command, key }
    by_key[key] = args
    self.order[#self.order + 1] = args
  end
  return args
end

function Context:zadd(key, score, member)
  if not self.joined then
    server.call('ZADD', key, score, member)
    return
  end
  local args = queue(self, 'ZADD', key)
  args[#args + 1] = score
  args[#args + 1] = member
end

function Context:zrem(key, member)
  if not self.joined then
    server.call('ZREM', key, member)
    return
  end
  local args = queue(self, 'ZREM', key)
  args[#args + 1] = member
end

function Context:sadd(key, member)
  if not self.joined then
    server.call('SADD', key, member)
    return
  end
  local args = queue(self, 'SADD', key)
  args[#args + 1] = member
end

function Context:srem(key, member)
  if not self.joined then
    server.call('SREM', key, member)
    return
  end
  local args = queue(self, 'SREM', key)
  args[#args + 1] = member
end

function Context:flush()
  if not self.joined then return end
  for _, args in ipairs(self.order or {}) do
    if #args <= MAX_ARGS then
      server.call(unpack(args))
    else
      for first = 3, #args, MAX_ARGS do
        server.call(args[1], args[2], unpack(args, first, math.min(first + MAX_ARGS - 1, #args)))
      end
    end
  end
  for lane in pairs(self.rings or {}) do self:ring(lane) end
  self.rings = nil
  self.order, self.ZADD, self.ZREM, self.SADD, self.SREM = nil, nil, nil, nil, nil
end

local DEFAULT_WEIGHT_MS = 1e12

local DEFAULTS = { state = 'active', weight = DEFAULT_WEIGHT_MS, reclaim_grace = 0 }

-- Tells that a lane has no settings of its own; for callers that found it out by the way.
function Context:is_ordinary(lane)
  self.lane_id, self.lane_settings = lane, DEFAULTS
end

-- The partition's copy of the lane settings; no copy means the defaults.
function Context:lane(lane)
  if lane ~= self.lane_id then
    local stored = server.call('HMGET', K.lane(self.tag, lane, 'config'),
      'state', 'priority_weight_ms', 'reclaim_grace_ms', 'emit_renewals')
    self.lane_id, self.lane_settings = lane, {
      state = stored[1] or 'active',
      weight = tonumber(stored[2] or DEFAULT_WEIGHT_MS),
      reclaim_grace = tonumber(stored[3] or 0),
      emit_renewals = stored[4] == '1',
    }
  end
  return self.lane_settings
end

-- Lowest score first: higher priority, then older.
function Context:score(rec)
  local priority = tonumber(rec.priority or 0)
  if priority == 0 then return tonumber(rec.created_at) end
  return tonumber(rec.created_at) - priority * self:lane(rec.lane_id).weight
end

-- A paused or disabled lane hands out nothing; only an operator's fused claim passes by.
function Context:is_closed(lane)
  local state = self:lane(lane).state
  return state == 'paused' or state == 'disabled'
end

-- Whether a worker could find claimable work of this lane here.
function Context:holds_work(lane)
  return server.call('EXISTS', K.eligible(self.tag, lane), K.lane(self.tag, lane, 'reclaimable'),
    K.lane(self.tag, lane, 'sigs')) > 0 and not self:is_closed(lane)
end

-- Tells idle workers that a lane of this partition has claimable work. One ring
-- wakes one worker; a claim that leaves work behind rings again.
function Context:ring(lane)
  if SETTINGS.cluster then
    server.call('SPUBLISH', K.wake(self.tag, lane), lane)
  else
    server.call('ZADD', K.wake(self.tag, lane), 'NX', self:text(self.now), K.partition(self.tag))
  end
end

-- Rings once the work can be found: now, or when the joined index changes are written.
function Context:ring_for(lane)
  if not self.joined then
    self:ring(lane)
    return
  end
  self.rings = self.rings or {}
  self.rings[lane] = true
end
