-- One call's context: partition, time, lane settings, and index changes that
-- are joined into one command per index. Records are written before indexes.
local Context = {}
Context.__index = Context

-- Lua's unpack puts every argument on its stack; larger batches go in pieces.
local MAX_ARGS = 400

function Context.open(tag)
  return setmetatable({ tag = tag, now = clock.now() }, Context)
end

-- A time as text. The server would turn the number into text anew for every command.
function Context:text(ms)
  local texts = self.texts
  if not texts then
    texts = {}
    self.texts = texts
  end
  local known = texts[ms]
  if not known then
    known = string.format('%.0f', ms)
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
  local args = queue(self, 'ZADD', key)
  args[#args + 1] = score
  args[#args + 1] = member
end

function Context:zrem(key, member)
  local args = queue(self, 'ZREM', key)
  args[#args + 1] = member
end

function Context:sadd(key, member)
  local args = queue(self, 'SADD', key)
  args[#args + 1] = member
end

function Context:srem(key, member)
  local args = queue(self, 'SREM', key)
  args[#args + 1] = member
end

function Context:flush()
  for _, args in ipairs(self.order or {}) do
    if #args <= MAX_ARGS then
      server.call(unpack(args))
    else
      for first = 3, #args, MAX_ARGS do
        server.call(args[1], args[2], unpack(args, first, math.min(first + MAX_ARGS - 1, #args)))
      end
    end
  end
  self.order, self.ZADD, self.ZREM, self.SADD, self.SREM = nil, nil, nil, nil, nil
end

local DEFAULT_WEIGHT_MS = 1e12

-- The partition's copy of the lane settings; no copy means the defaults.
function Context:lane(lane)
  local all = self.lane_settings
  if not all then
    all = {}
    self.lane_settings = all
  end
  local settings = all[lane]
  if not settings then
    local stored = server.call('HMGET', K.lane(self.tag, lane, 'config'),
      'state', 'priority_weight_ms', 'reclaim_grace_ms', 'emit_renewals')
    settings = {
      state = stored[1] or 'active',
      weight = tonumber(stored[2] or DEFAULT_WEIGHT_MS),
      reclaim_grace = tonumber(stored[3] or 0),
      emit_renewals = stored[4] == '1',
    }
    all[lane] = settings
  end
  return settings
end

-- Lowest score first: higher priority, then older.
function Context:score(rec)
  local priority = tonumber(rec.priority or 0)
  if priority == 0 then return tonumber(rec.created_at) end
  return tonumber(rec.created_at) - priority * self:lane(rec.lane_id).weight
end

-- A paused lane gives nothing out: waking workers for it would only cost.
local YIELDS_NOTHING = { paused = true, disabled = true }

-- Whether a worker could find claimable work of this lane here.
function Context:holds_work(lane)
  return server.call('EXISTS', K.eligible(self.tag, lane), K.lane(self.tag, lane, 'reclaimable'),
    K.lane(self.tag, lane, 'sigs')) > 0 and not YIELDS_NOTHING[self:lane(lane).state]
end

-- Tells idle workers that a lane of this partition has claimable work. One ring
-- wakes one worker; a claim that leaves work behind rings again.
function Context:ring(lane)
  if SETTINGS.cluster then
    server.call('SPUBLISH', K.wake(self.tag, lane), lane)
  else
    server.call('ZADD', K.wake(self.tag, lane), 'NX', self.now, string.match(self.tag, '%d+'))
  end
end
