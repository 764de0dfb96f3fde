-- Deleting all that belongs to an execution, a bounded number of keys a call.

local CHUNK = 500
-- How many steps one call takes.
local STEPS = 4

-- Keys of one attempt; with output also its stream and its summary.
local function add_attempt(c, id, index, doomed, output)
  doomed[#doomed + 1] = K.attempt(c.tag, id, index)
  if not output then return end
  doomed[#doomed + 1] = K.stream(c.tag, id, index)
  doomed[#doomed + 1] = K.stream_meta(c.tag, id, index)
  doomed[#doomed + 1] = K.stream_closed(c.tag, id, index)
  doomed[#doomed + 1] = K.summary(c.tag, id, index)
end

local function delete(keys)
  for first, last in values.pieces(keys) do server.call('DEL', unpack(keys, first, last)) end
end

-- Deletes up to `room` keys that hang on the execution's own listings; the listings go
-- last, so that an interrupted purge finds the rest. Returns how much room is left.
function purging.listed(c, id, room)
  local waitpoints, signals_key = K.waitpoints(c.tag, id), K.signals(c.tag, id)
  while room > 0 do
    local ids = server.call('ZRANGE', signals_key, 0, math.floor(room / 2))
    if #ids == 0 then break end
    local doomed = {}
    for _, signal_id in ipairs(ids) do
      doomed[#doomed + 1] = K.signal(id, signal_id)
      doomed[#doomed + 1] = K.signal_payload(id, signal_id)
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
      doomed[#doomed + 1] = K.waitpoint(c.tag, waitpoint_id)
      doomed[#doomed + 1] = K.waitpoint_signals(c.tag, waitpoint_id)
    end
    delete(doomed)
    server.call('ZREM', K.index(c.tag, 'pending_waitpoint_expiry'), unpack(ids))
    room = room - #doomed
  end
  return room
end

-- Deletes attempts from the highest index down; returns how many are still to do.
function purging.attempts(c, id, count, room, output)
  local doomed = {}
  while count > 0 and #doomed < room do
    count = count - 1
    add_attempt(c, id, count, doomed, output)
  end
  delete(doomed)
  return count
end

-- One bounded step; the steps of a call share what it may delete. What is left is the number of
-- attempts, with an `s` when they had output; nil when all is gone.
function purging.step(c, id, left)
  local attempts, output = tonumber(string.match(left, '%d+')), string.find(left, 's', 1, true)
  c.purge_room = c.purge_room or STEPS * CHUNK
  local given = math.min(CHUNK, c.purge_room)
  local room, rest = purging.listed(c, id, given), attempts
  if room > 0 then rest = purging.attempts(c, id, attempts, room, output) end
  c.purge_room = c.purge_room - (given - room) - (output and 5 or 1) * (attempts - rest)
  attempts = rest
  if room > 0 and attempts == 0 then return nil end
  return string.format('%d', attempts) .. (output and 's' or '')
end

-- Deletes all that a trimmed execution has left: a new one of the same id must not find any of it.
-- The error when that is more than one call may delete; a repeat continues.
function purging.finish(c, id)
  local backlog = K.index(c.tag, 'purge_backlog')
  local left = server.call('HGET', backlog, id)
  if not left then return end
  while left and (c.purge_room or 1) > 0 do left = purging.step(c, id, left) end
  if left then
    server.call('HSET', backlog, id, left)
    return reply.err('execution_being_deleted')
  end
  server.call('HDEL', backlog, id)
end
