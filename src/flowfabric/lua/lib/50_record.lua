-- Reading and writing execution records. A record is a small hash; an absent field has its default
-- (namespace and lane `default`, counters 0). `lease` is `<lease_id>/<epoch>`, `attempt` is
-- `<attempt_id>/<index>`, `worker` is `<worker_id> <worker_instance_id>`: the last ones issued.
-- The state alone tells whether they are current, so ending a lease clears nothing.

-- The record, or nil if there is none. A record without a readable state stops the call.
function record.read(c, id)
  local at_hand = c.at_hand and c.at_hand[id]
  if at_hand then return at_hand end
  local flat = server.call('HGETALL', K.core(c.tag, id))
  if #flat == 0 then return nil end
  -- Preallocated for the usual fields: growing the table costs 0.5 µs per claim.
  local rec = values.fields(flat, {
    lane_id = 'default', namespace = 'default', state = nil, execution_kind = nil, created_at = nil,
    payload_encoding = nil, started_at = nil, lease = nil, attempt = nil, worker = nil,
    lease_expires_at = nil, completed_at = nil,
  })
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

-- What makes the record unreadable, as `<field>: <why>`, or nil.
function record.problem(rec)
  if not rec.state then return 'state: is missing' end
  if not S.is_code(rec.state) then return "state: '" .. rec.state .. "' is not a state code" end
  if not rec.created_at then return 'created_at: is missing' end
  for i = 1, #NUMBERS do
    local name = NUMBERS[i]
    local value = rec[name]
    if value and not tonumber(value) then return name .. ": '" .. value .. "' is not a number" end
  end
  for i = 1, #PAIRS do
    local name = PAIRS[i]
    local value = rec[name]
    if value and not (#value > 37 and string.find(value, '^[%x-]+/%d+$')) then
      return name .. ": '" .. value .. "' is not <id>/<number>"
    end
  end
end

function record.lease_problem(rec)
  if not S.is_active(rec.state) or S.is_unowned(rec.state) then return nil end
  for _, name in ipairs(HELD) do
    if not rec[name] then return name .. ': is missing though the execution is active' end
  end
end

local function stop_on(id, problem)
  if problem then error(id .. ': ' .. problem, 0) end
end

-- Stops the call, before it writes anything, if the record cannot be read.
function record.check(id, rec) stop_on(id, record.problem(rec)) end

-- `read`, and checks every field that a transition may compute with.
function record.checked(c, id)
  local rec = record.read(c, id)
  if rec then record.check(id, rec) end
  return rec
end

-- `check` for calls that end, move or take over a lease.
function record.check_lease(id, rec) stop_on(id, record.lease_problem(rec)) end

function record.checked_lease(c, id)
  local rec = record.checked(c, id)
  if rec then record.check_lease(id, rec) end
  return rec
end

-- A payload or result of up to this many bytes is a field of the record, which stays compact. A
-- separate key costs an extra command per access, and more memory.
local SMALL_BYTES = 64
function record.is_small(bytes) return #bytes > 0 and #bytes <= SMALL_BYTES end

-- The payload, or false if there is none. `payload_key` means that it has a separate key; without
-- it, a task without arguments needs no extra read.
function record.payload(c, id, rec)
  if rec.payload_key then return server.call('GET', K.payload(c.tag, id)) end
  return rec.payload or false
end

-- The result, or false if there is none.
function record.result(c, id, rec) return rec.result or server.call('GET', K.result(c.tag, id)) end

-- The policy stored at creation, empty without one; and whether it is readable.
function record.policy(c, id)
  local readable, policy = pcall(cjson.decode, server.call('GET', K.policy(c.tag, id)) or '{}')
  readable = readable and type(policy) == 'table'
  return readable and policy or {}, readable
end

function record.attempt_index(rec)
  return rec.attempt and tonumber(string.match(rec.attempt, '/(%d+)$')) or nil
end

function record.attempt_count(rec) return (record.attempt_index(rec) or -1) + 1 end
function record.attempt_id(rec) return rec.attempt and string.sub(rec.attempt, 1, 36) or '' end
function record.lease_id(rec) return rec.lease and string.sub(rec.lease, 1, 36) or '' end
function record.epoch(rec) return rec.lease and tonumber(string.sub(rec.lease, 38)) or 0 end

record.instance_of = values.memo(function(worker) return string.match(worker, ' (.*)$') or '' end)

function record.worker_instance(rec) return rec.worker and record.instance_of(rec.worker) or '' end

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

-- Adds a text to the fields of a transition. An empty text clears the value of an earlier attempt.
function record.add_or_clear(c, id, rec, fields, name, text)
  if text == '' then return record.clear(c, id, rec, name) end
  values.add(fields, name, text)
end

-- The only way to change state: writes the state and fields (name, value pairs), in the store and
-- in `rec`. Leave the indexes of the old state first.
function record.transition(c, id, rec, state, ...)
  local key = K.core(c.tag, id)
  if rec.unwritten then
    server.call('HSET', key, 'state', state, unpack(record.with_unwritten(rec, { ... })))
  else
    server.call('HSET', key, 'state', state, ...)
  end
  if rec.flow_id then
    flow.count(c, rec.flow_id, rec.counted or rec.state, state)
    rec.counted = nil
  end
  rec.state = state
  local fields = { ... }
  for i = 1, #fields, 2 do rec[fields[i]] = fields[i + 1] end
end

-- Sets a member's state and fields (name, value pairs) for its next transition to write and count.
function record.move_later(rec, state, ...)
  local fields = { ... }
  for i = 1, #fields, 2 do rec[fields[i]] = fields[i + 1] end
  rec.unwritten = fields
  rec.state, rec.counted = state, rec.state
end

-- Adds the fields of `move_later` to a list. They may have been changed or cleared since.
function record.with_unwritten(rec, fields)
  for i = 1, #rec.unwritten, 2 do values.add(fields, rec.unwritten[i], rec[rec.unwritten[i]]) end
  rec.unwritten = nil
  return fields
end

-- Reads the state again, which another part of the call may have changed.
function record.reload_state(c, id, rec) rec.state = record.read(c, id).state end

function record.set(c, id, rec, name, value)
  server.call('HSET', K.core(c.tag, id), name, value)
  rec[name] = value
end

local ARCHIVED = {
  'retry_reason', 'replay_reason', 'replay_requested_by', 'reclaim_reason',
  'previous_attempt_index', 'resumed_at', 'paused',
}

function record.archive(c, id, rec, state, extra)
  local args = {
    'HSET', K.attempt(c.tag, id, record.attempt_index(rec)),
    'attempt', rec.attempt, 'lease', rec.lease, 'worker', rec.worker,
    'attempt_type', rec.attempt_type or 'initial', 'attempt_state', state,
    'started_at', rec.attempt_started_at or rec.started_at,
    'ended_at', rec.completed_at or c.now,
  }
  for _, name in ipairs(ARCHIVED) do values.add(args, name, rec[name]) end
  for name, value in pairs(extra or {}) do values.add(args, name, value) end
  server.call(unpack(args))
end
