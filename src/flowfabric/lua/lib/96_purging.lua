-- Deleting all that belongs to an execution, a bounded number of keys a call.
local purging = {}

local CHUNK = 500

-- Keys of one attempt, its stream and its summary.
local function add_attempt(c, id, index, doomed)
  doomed[#doomed + 1] = K.attempt(c.tag, id, index)
  local stream = streams.key(c, id, index)
  doomed[#doomed + 1] = stream
  doomed[#doomed + 1] = stream .. ':meta'
  doomed[#doomed + 1] = stream .. ':closed'
  doomed[#doomed + 1] = K.attempt(c.tag, id, index) .. ':summary'
end

local function delete(keys)
  for first = 1, #keys, CHUNK do
    server.call('DEL', unpack(keys, first, math.min(first + CHUNK - 1, #keys)))
  end
end

-- Deletes up to `room` keys that hang on the execution's own listings; the listings go
-- last, so that an interrupted purge finds the rest. Returns how much room is left.
function purging.listed(c, id, room)
  local waitpoints, signals_key = suspension.waitpoints_key(c, id), suspension.signals_key(c, id)
  while room > 0 do
    local ids = server.call('ZRANGE', signals_key, 0, math.floor(room / 2))
    if #ids == 0 then break end
    local doomed = {}
    for _, signal_id in ipairs(ids) do
      doomed[#doomed + 1] = suspension.signal(c, signal_id)
      doomed[#doomed + 1] = suspension.signal(c, signal_id) .. ':payload'
    end
    delete(doomed)
    server.call('ZREM', signals_key, unpack(ids))
    room = room - #doomed
  end
  while room > 0 do
    local ids = server.call('SPOP', waitpoints, math.min(100, room))
    if #ids == 0 then break end
    local doomed = {}
    for _, waitpoint_id in ipairs(ids) do
      doomed[#doomed + 1] = suspension.waitpoint(c, waitpoint_id)
      doomed[#doomed + 1] = suspension.waitpoint(c, waitpoint_id) .. ':signals'
    end
    delete(doomed)
    server.call('ZREM', K.index(c.tag, 'pending_waitpoint_expiry'), unpack(ids))
    room = room - #doomed
  end
  return room
end

-- Deletes attempts from the highest index down; returns how many are still to do.
function purging.attempts(c, id, count, room)
  local doomed = {}
  while count > 0 and #doomed < room do
    count = count - 1
    add_attempt(c, id, count, doomed)
  end
  delete(doomed)
  return count
end

-- One bounded step; the number of attempts still to delete, or nil when all is gone.
function purging.step(c, id, attempts)
  local room = purging.listed(c, id, CHUNK)
  if room <= 0 then return attempts end
  local left = purging.attempts(c, id, attempts, room)
  return left > 0 and left or nil
end
