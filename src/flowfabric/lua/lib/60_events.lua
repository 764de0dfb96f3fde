-- The partition's event feed, and the short per-execution list of unusual events.
-- Stored names are short (decoded by core/contracts/events.py): t type, id execution,
-- k kind, L lease, A attempt, w worker, ns namespace, l lane, f flow, at time; left out when
-- they have their default, `at` when the entry's own id tells it.

local HISTORY_MAX = 32
-- Two a lifecycle: these are written without building a list first.
local USUAL = { acquired = true, completion = true }
local UNUSUAL = { expired = true, revoked = true, reclaimed = true, replayed = true }
local UNUSUAL_RELEASE = { failed_retry_scheduled = true, suspend = true }

-- What an entry says under a name, or nil. Its fields begin behind the arguments of the command.
local FIELDS_FROM = 7
local function said(args, name)
  for i = FIELDS_FROM, #args, 2 do
    if args[i] == name then return args[i + 1] end
  end
end

-- Appends one entry; `...` are further name, value pairs, none of them nil or false.
function events.emit(c, kind, id, rec, ...)
  if USUAL[kind] and rec.namespace == 'default' and not rec.flow_id and not clock.shifted then
    if rec.lane_id == 'default' then
      server.call('XADD', K.events(c.tag), 'MAXLEN', '~', SETTINGS.events_maxlen, '*',
        't', kind, 'id', id, 'k', rec.execution_kind, ...)
    else
      server.call('XADD', K.events(c.tag), 'MAXLEN', '~', SETTINGS.events_maxlen, '*',
        't', kind, 'id', id, 'k', rec.execution_kind, 'l', rec.lane_id, ...)
    end
    return
  end
  local args = {
    'XADD', K.events(c.tag), 'MAXLEN', '~', SETTINGS.events_maxlen, '*',
    't', kind, 'id', id, 'k', rec.execution_kind, ...
  }
  local function add(name, value)
    args[#args + 1] = name
    args[#args + 1] = value
  end
  if rec.namespace ~= 'default' then add('ns', rec.namespace) end
  if rec.lane_id ~= 'default' then add('l', rec.lane_id) end
  if rec.flow_id then add('f', rec.flow_id) end
  if clock.shifted then add('at', c.now) end
  local entry = server.call(unpack(args))
  if UNUSUAL[kind] or (kind == 'released' and UNUSUAL_RELEASE[said(args, 'r')]) then
    local fields = { 'event_id', entry }
    for i = FIELDS_FROM, #args do
      local value = args[i]
      fields[#fields + 1] = type(value) == 'number' and string.format('%.0f', value) or value
    end
    local key = K.history(c.tag, id)
    server.call('RPUSH', key, cmsgpack.pack(fields))
    server.call('LTRIM', key, -HISTORY_MAX, -1)
  end
end

-- `emit` with the lease and worker of the record.
function events.emit_lease(c, kind, id, rec, ...)
  return events.emit(c, kind, id, rec, 'L', rec.lease, 'A', rec.attempt, 'w', rec.worker, ...)
end
