-- One call's context: partition, time, lane settings, and index changes. A call for many
-- executions joins these into one command per index and writes them after the records.
Context.__index = Context

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

-- The command that collects writes to an index. Writes to one key keep their order: a different
-- command starts after the one before it, so the last write to a member counts.
local function queue(self, command, key)
  local open = self.open_commands
  if not open then
    open = {}
    self.open_commands, self.queued = open, {}
  end
  local args = open[key]
  if not args or args[1] ~= command then
    args = { command, key }
    open[key] = args
    self.queued[#self.queued + 1] = args
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

-- Forgets a signature that no claimable execution of the lane has any more.
local function drop_unused(self, lane, signature)
  if server.call('EXISTS', K.eligible(self.tag, lane, signature),
      K.reclaimable(self.tag, lane, signature)) == 0 then
    server.call('SREM', K.lane(self.tag, lane, 'sigs'), signature)
  end
end

-- An execution with this signature has left its index: the signature goes with the last one, as
-- soon as the index changes are written.
function Context:release_signature(lane, signature)
  if not signature then return end
  if not self.joined then
    drop_unused(self, lane, signature)
    return
  end
  self.released = self.released or {}
  self.released[lane] = self.released[lane] or {}
  self.released[lane][signature] = true
end

function Context:flush()
  if not self.joined then return end
  for _, args in ipairs(self.queued or {}) do
    for first, last in values.pieces(args, 3) do
      server.call(args[1], args[2], unpack(args, first, last))
    end
  end
  for lane, signatures in pairs(self.released or {}) do
    for signature in pairs(signatures) do drop_unused(self, lane, signature) end
  end
  for lane in pairs(self.rings or {}) do self:ring(lane) end
  self.rings, self.queued, self.open_commands, self.released = nil, nil, nil, nil
end

local DEFAULT_WEIGHT_MS = 1e12

local DEFAULTS = { state = 'active', weight = DEFAULT_WEIGHT_MS, reclaim_grace = 0 }

-- Tells that a lane has no settings of its own; for callers that found it out by the way.
function Context:is_ordinary(lane)
  self.lanes = self.lanes or {}
  self.lanes[lane] = DEFAULTS
end

function Context:knows_lane(lane) return self.lanes and self.lanes[lane] ~= nil end

-- The partition's copy of the lane settings; no copy means the defaults.
function Context:lane(lane)
  self.lanes = self.lanes or {}
  local known = self.lanes[lane]
  if not known then
    local stored = server.call('HMGET', K.lane(self.tag, lane, 'config'),
      'state', 'priority_weight_ms', 'reclaim_grace_ms', 'emit_renewals')
    known = {
      state = stored[1] or 'active',
      weight = tonumber(stored[2] or DEFAULT_WEIGHT_MS),
      reclaim_grace = tonumber(stored[3] or 0),
      emit_renewals = stored[4] == '1',
    }
    self.lanes[lane] = known
  end
  return known
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
-- wakes one worker; a claim that leaves work behind rings again. A ring that is refused, for want
-- of a right for example, undoes nothing: the sweep of the workers finds the work.
function Context:ring(lane)
  if SETTINGS.cluster then
    pcall(server.call, 'SPUBLISH', K.wake(self.tag, lane), lane)
  else
    pcall(server.call, 'ZADD', K.wake(self.tag, lane), 'NX', self:text(self.now),
      K.partition(self.tag))
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
