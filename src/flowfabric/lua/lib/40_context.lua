-- One call's context: partition, time, lane settings, and index changes. A call for many
-- executions joins its index changes into one command per index and writes them last.
Context.__index = Context

-- `joined` is for calls that may handle several executions.
function Context.open(tag, joined)
  -- Preallocated for the fields that calls add, especially those that end members of flows.
  local self = setmetatable({
    tag = tag, now = clock.now(), joined = joined, lanes = {}, queued = nil, open_commands = nil,
    released = nil, rung = nil, rings_later = nil, claimer = nil, kept = nil, at_hand = nil,
    told = nil, flows = nil, tally = nil, units = nil, counts = nil, work = nil, ended = nil,
    trimmed = nil,
  }, Context)
  if joined then self.queued, self.open_commands, self.released = {}, {}, {} end
  return self
end

function Context:after(ms) return clock.after(self.now, ms) end

-- Writes to one key keep their order: a different command starts a new group after the previous one,
-- so the last write to a member wins.
local function write(self, command, key, member, score)
  if not self.joined then
    if score then
      server.call(command, key, score, member)
    else
      server.call(command, key, member)
    end
    return
  end
  local args = self.open_commands[key]
  if not args or args[1] ~= command then
    args = { command, key }
    self.open_commands[key] = args
    self.queued[#self.queued + 1] = args
  end
  if score then args[#args + 1] = score end
  args[#args + 1] = member
end

function Context:zadd(key, score, member) return write(self, 'ZADD', key, member, score) end
function Context:zrem(key, member) return write(self, 'ZREM', key, member) end
function Context:sadd(key, member) return write(self, 'SADD', key, member) end
function Context:srem(key, member) return write(self, 'SREM', key, member) end

-- Removes a signature that no claimable execution of the lane has any longer.
local function drop_unused(self, lane, signature)
  if server.call('EXISTS', K.eligible(self.tag, lane, signature),
      K.reclaimable(self.tag, lane, signature)) == 0 then
    server.call('SREM', K.lane(self.tag, lane, 'sigs'), signature)
  end
end

-- Removes the signature, once the index changes are written, if no execution has it any longer.
function Context:release_signature(lane, signature)
  if not signature then return end
  if not self.joined then return drop_unused(self, lane, signature) end
  self.released[lane] = self.released[lane] or {}
  self.released[lane][signature] = true
end

-- Closes a context that was opened by this call.
function Context:close()
  flow.settle(self)
  self:flush()
end

function Context:flush()
  if not self.joined then return end
  for i = 1, #self.queued do values.send(self.queued[i]) end
  for lane, signatures in pairs(self.released) do
    for signature in pairs(signatures) do drop_unused(self, lane, signature) end
  end
  self.queued, self.open_commands, self.released = {}, {}, {}
end

local DEFAULT_WEIGHT_MS = 1e12
Context.DEFAULTS = { state = 'active', weight = DEFAULT_WEIGHT_MS, reclaim_grace = 0 }

-- The partition's copy of the lane settings, or the defaults.
function Context:lane(lane)
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

-- Lowest score first: higher priority, then older. A number, or its text as stored.
function Context:score(rec)
  local priority = tonumber(rec.priority or 0)
  if priority == 0 then return rec.created_at end
  return tonumber(rec.created_at) - priority * self:lane(rec.lane_id).weight
end

-- Only an operator's grant-and-claim takes work from a paused or disabled lane.
function Context:is_closed(lane)
  local state = self:lane(lane).state
  return state == 'paused' or state == 'disabled'
end

function Context:holds_work(lane)
  return server.call('EXISTS', K.eligible(self.tag, lane), K.lane(self.tag, lane, 'reclaimable'),
    K.lane(self.tag, lane, 'sigs')) > 0 and not self:is_closed(lane)
end

-- How many bells listeners know at most, how long they know one, how many listeners learn of a new
-- one at once, and how long they have to hear of it.
local MAX_BELLS, BELL_MS, MAX_TOLD, TOLD_MS = 1000, 3600000, 1000, 60000

-- Tells listeners that there is a bell they do not know yet. It rings already: of those who may take
-- the work, one hears it.
local function announce(self, bell)
  local now = values.text(self.now)
  if server.call('ZADD', K.BELLS, 'NX', now, bell) == 0 then return end
  local gone = server.call('ZRANGE', K.BELLS, '-inf', self.now - BELL_MS, 'BYSCORE')
  if #gone == 0 and server.call('ZCARD', K.BELLS) > MAX_BELLS then
    gone = server.call('ZRANGE', K.BELLS, 0, 0)
  end
  for first, last in values.pieces(gone) do
    server.call('ZREM', K.BELLS, unpack(gone, first, last))
    for i = first, last do server.call('UNLINK', K.wake(self.tag, gone[i])) end
  end
  -- They read all that this call announces.
  if self.told then return end
  self.told = true
  for _, listener in ipairs(server.call('ZRANGE', K.LISTENERS, 0, MAX_TOLD - 1, 'REV')) do
    local ear = K.ear(listener)
    server.call('ZADD', ear, now, 'new')
    server.call('PEXPIRE', ear, TOLD_MS)
  end
end

local function strike(self, key, bell, signature)
  server.call('ZADD', key, 'NX', values.text(self.now), string.match(self.tag, '%d+'))
  if signature then announce(self, bell) end
end

-- Deletes a key in the place of bells that is of another type: rings only hint at work.
function Context.mend_bell(key)
  local kind = server.call('TYPE', key).ok
  if kind ~= 'zset' and kind ~= 'none' then server.call('UNLINK', key) end
end

local function strike_mended(self, key, bell, signature)
  for _, each in ipairs({ key, K.BELLS, K.LISTENERS }) do Context.mend_bell(each) end
  self.told = nil
  strike(self, key, bell, signature)
end

-- Wakes one idle worker that may take work of this lane with a signature, in this partition; a claim
-- that leaves work wakes the next. A refused ring, for example without permission, undoes nothing:
-- the workers' sweep finds the work.
function Context:ring(lane, signature)
  local bell = signature and K.bell(lane, signature) or lane
  if self.rings_later then
    self.rings_later[bell] = { lane = lane, signature = signature }
    return
  end
  self.rung = self.rung or {}
  if self.rung[bell] then return end
  self.rung[bell] = true
  if SETTINGS.cluster then
    pcall(listeners.ring, self, bell, lane, signature)
    return
  end
  local key = K.wake(self.tag, bell)
  if not pcall(strike, self, key, bell, signature) then
    pcall(strike_mended, self, key, bell, signature)
  end
end
