-- Deleting all keys of an execution, a limited number per call.

local CHUNK, STEPS = 500, 4

local function delete(keys)
  for first, last in values.pieces(keys) do server.call('DEL', unpack(keys, first, last)) end
end

-- Deletes the keys of the ids in a listing, within the limit; returns how much is left of it. A
-- listing of the wrong type counts as empty and is deleted.
local function delete_listed(key, pop, step, room, keys_of)
  while room > 0 do
    local readable, ids = try(server.call, pop, key, math.ceil(room / 2))
    if not readable then server.call('DEL', key) end
    if not readable or #ids == 0 then break end
    local doomed = {}
    for i = 1, #ids, step do values.append(doomed, keys_of(ids[i])) end
    delete(doomed)
    room = room - #doomed
  end
  return room
end

local function delete_listings(c, id, room)
  room = delete_listed(K.signals(c.tag, id), 'ZPOPMIN', 2, room, function(signal_id)
    return { K.signal(id, signal_id), K.signal_payload(id, signal_id) }
  end)
  return delete_listed(K.waitpoints(c.tag, id), 'SPOP', 1, room, function(waitpoint_id)
    server.call('ZREM', K.index(c.tag, 'pending_waitpoint_expiry'), waitpoint_id)
    return { K.waitpoint(c.tag, waitpoint_id), K.waitpoint_signals(c.tag, waitpoint_id) }
  end)
end

local function delete_attempts(c, id, count, room, output)
  local doomed = {}
  while count > 0 and #doomed < room do
    count = count - 1
    doomed[#doomed + 1] = K.attempt(c.tag, id, count)
    if output then
      doomed[#doomed + 1] = K.stream(c.tag, id, count)
      doomed[#doomed + 1] = K.stream_meta(c.tag, id, count)
      doomed[#doomed + 1] = K.stream_closed(c.tag, id, count)
      doomed[#doomed + 1] = K.summary(c.tag, id, count)
    end
  end
  delete(doomed)
  return count
end

-- One step; the steps of a call share its limit. `left` is the number of remaining attempts, with an
-- `s` if they had output; returns the new value, nil once all is deleted.
function purging.step(c, id, left)
  local attempts, output = tonumber(string.match(left, '%d+')), string.find(left, 's', 1, true)
  c.purge_room = c.purge_room or STEPS * CHUNK
  local given = math.min(CHUNK, c.purge_room)
  local room, rest = delete_listings(c, id, given), attempts
  if room > 0 then rest = delete_attempts(c, id, attempts, room, output) end
  c.purge_room = c.purge_room - (given - room) - (output and 5 or 1) * (attempts - rest)
  if room > 0 and rest == 0 then return nil end
  return values.text(rest) .. (output and 's' or '')
end

-- Deletes a terminal execution; returns whether all its keys are deleted. If not, ff_purge continues.
function purging.delete(c, id, rec)
  server.call('DEL', K.core(c.tag, id), K.policy(c.tag, id), K.payload(c.tag, id),
    K.result(c.tag, id), K.tags(c.tag, id), K.history(c.tag, id), K.grant(c.tag, id),
    K.steps(c.tag, id), K.suspension(c.tag, id),
    K.marks(c.tag, id), K.satisfiers(c.tag, id), K.met(c.tag, id),
    K.pending_waitpoints(c.tag, id), K.suspend_dedup(c.tag, id))
  server.call('ZREM', K.lane(c.tag, rec.lane_id, 'terminal'), id)
  server.call('ZREM', K.index(c.tag, 'all_executions'), id)
  if rec.flow_id then flow_purging.forget(c, id, rec) end
  local output = (rec.streamed or rec.tailed) and 's' or ''
  local left = purging.step(c, id, record.attempt_count(rec) .. output)
  if left then server.call('HSET', K.index(c.tag, 'purge_backlog'), id, left) end
  return not left
end

-- Deletes the remains of a trimmed execution, so that a new one with its id starts empty. The error
-- if that takes more than one call, which a repeat continues.
function purging.finish_problem(c, id)
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
