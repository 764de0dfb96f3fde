-- Reading and writing execution records. A record is a small hash; an absent
-- field has its default (namespace and lane `default`, counters 0).
-- `lease` is `<lease_id>/<epoch>`, `attempt` is `<attempt_id>/<index>`,
-- `worker` is `<worker_id> <worker_instance_id>`: the last ones issued. Whether
-- they are current follows from the state alone, so ending a lease clears nothing.

-- The record, or nil when there is none. One without a readable state is nobody's to act on.
function record.read(c, id)
  local flat = server.call('HGETALL', K.core(c.tag, id))
  if #flat == 0 then return nil end
  local rec = values.fields(flat, { lane_id = 'default', namespace = 'default' })
  if not S.is_code(rec.state) then record.check(id, rec) end
  return rec
end

local NUMBERS = {
  'created_at', 'priority', 'started_at', 'lease_expires_at', 'delay_until', 'completed_at',
  'retry_count', 'replay_count', 'lease_reclaim_count', 'max_reclaim_count', 'retention_ms',
  'attempt_timeout_ms', 'attempt_timeout_remaining_ms', 'execution_deadline_at',
  'grant_expires_at', 'signal_bytes',
}
local PAIRS = { 'lease', 'attempt' }
local HELD = { 'lease', 'attempt', 'worker', 'lease_expires_at' }

-- What makes the record unreadable, as `<field>: <why>`; nil when nothing does.
function record.problem(rec)
  if not rec.state then return 'state: is missing' end
  if not S.is_code(rec.state) then return "state: '" .. rec.state .. "' is not a state code" end
  if not rec.created_at then return 'created_at: is missing' end
  for _, name in ipairs(NUMBERS) do
    local value = rec[name]
    if value and not tonumber(value) then return name .. ": '" .. value .. "' is not a number" end
  end
  for _, name in ipairs(PAIRS) do
    local value = rec[name]
    if value and not (#value > 37 and string.find(value, '^[%x-]+/%d+$')) then
      return name .. ": '" .. value .. "' is not <id>/<number>"
    end
  end
end

-- The same of the lease of an active execution.
function record.lease_problem(rec)
  if not S.is_active(rec.state) or S.is_unowned(rec.state) then return nil end
  for _, name in ipairs(HELD) do
    if not rec[name] then return name .. ': is missing though the execution is active' end
  end
end

-- Stops the call before it writes anything on the ground of a record that cannot be read.
function record.check(id, rec)
  local problem = record.problem(rec)
  if problem then error(id .. ': ' .. problem, 0) end
end

-- `read` with a look at every field a transition may compute with.
function record.checked(c, id)
  local rec = record.read(c, id)
  if rec then record.check(id, rec) end
  return rec
end

-- `checked` for those that end, move or take over a lease.
function record.checked_lease(c, id)
  local rec = record.checked(c, id)
  local problem = rec and record.lease_problem(rec)
  if problem then error(id .. ': ' .. problem, 0) end
  return rec
end

-- The policy frozen at creation: empty when there is none, nil when it cannot be read.
function record.policy(c, id)
  local text = server.call('GET', K.policy(c.tag, id))
  if not text then return {} end
  local readable, policy = pcall(cjson.decode, text)
  return readable and type(policy) == 'table' and policy or nil
end

-- A small whole number as text; making one from a number costs as much as a command.
local digits = {}
function record.digits(number)
  local known = digits[number]
  if not known then
    known = string.format('%d', number)
    if number < 1000 then digits[number] = known end
  end
  return known
end

function record.attempt_index(rec)
  return rec.attempt and tonumber(string.match(rec.attempt, '/(%d+)$')) or nil
end

function record.attempt_id(rec)
  return rec.attempt and string.sub(rec.attempt, 1, 36) or ''
end

-- Every attempt takes the next index, so the count follows from the last one.
function record.attempt_count(rec)
  local index = record.attempt_index(rec)
  return index and index + 1 or 0
end

function record.lease_id(rec)
  return rec.lease and string.sub(rec.lease, 1, 36) or ''
end

function record.epoch(rec)
  return rec.lease and tonumber(string.sub(rec.lease, 38)) or 0
end

local instances, instance_count = {}, 0
function record.instance_of(worker)
  local known = instances[worker]
  if not known then
    if instance_count >= 1000 then instances, instance_count = {}, 0 end
    known = string.match(worker, ' (.*)$') or ''
    instances[worker] = known
    instance_count = instance_count + 1
  end
  return known
end

function record.worker_instance(rec)
  return rec.worker and record.instance_of(rec.worker) or ''
end

-- Deletes those of the named fields that the record has.
function record.clear(c, id, rec, ...)
  local args = { 'HDEL', K.core(c.tag, id) }
  for _, name in ipairs({ ... }) do
    if rec[name] then
      args[#args + 1] = name
      rec[name] = nil
    end
  end
  if #args > 2 then server.call(unpack(args)) end
end

-- Adds a text to a flat list of fields to be written. No field stands for an empty one, so what
-- an earlier attempt left under the name is cleared.
function record.tell(c, id, rec, fields, name, text)
  if text == '' then
    record.clear(c, id, rec, name)
    return
  end
  fields[#fields + 1] = name
  fields[#fields + 1] = text
end

-- The one way from a state to another: writes the state and fields (name, value pairs), in the
-- store and in the record at hand. Leave the indexes of the old state first.
function record.transition(c, id, rec, state, ...)
  server.call('HSET', K.core(c.tag, id), 'state', state, ...)
  rec.state = state
  for i = 1, select('#', ...), 2 do
    local name, value = select(i, ...)
    rec[name] = value
  end
end

-- Writes fields, in the store and in the record at hand.
function record.set(c, id, rec, fields)
  local args = { 'HSET', K.core(c.tag, id) }
  for name, value in pairs(fields) do
    rec[name] = value
    args[#args + 1] = name
    args[#args + 1] = value
  end
  if #args > 2 then server.call(unpack(args)) end
end

-- Keeps what an ended attempt was, once the record is about to describe the next.
function record.archive(c, id, rec, state, extra)
  local args = {
    'HSET', K.attempt(c.tag, id, record.attempt_index(rec)),
    'attempt', rec.attempt, 'lease', rec.lease, 'worker', rec.worker,
    'attempt_type', rec.attempt_type or 'initial', 'attempt_state', state,
    'started_at', rec.attempt_started_at or rec.started_at,
    'ended_at', (extra and extra.ended_at) or rec.completed_at or c.now,
  }
  for _, name in ipairs({
    'retry_reason', 'replay_reason', 'replay_requested_by', 'reclaim_reason',
    'previous_attempt_index', 'resumed_at', 'paused',
  }) do
    if rec[name] then
      args[#args + 1] = name
      args[#args + 1] = rec[name]
    end
  end
  for name, value in pairs(extra or {}) do
    if name ~= 'ended_at' and value ~= '' then
      args[#args + 1] = name
      args[#args + 1] = value
    end
  end
  server.call(unpack(args))
end
