-- The partition's event feed, and the short per-execution list of unusual events.
-- Stored names are short (decoded by core/contracts/events.py): t type, at time,
-- id execution, ns namespace, l lane, k kind, f fence, w worker; defaults left out.
local events = {}

local HISTORY_MAX = 32
local UNUSUAL = { expired = true, revoked = true, reclaimed = true, replayed = true }
local UNUSUAL_RELEASE = { failed_retry_scheduled = true, suspend = true }

local function common(c, kind, id, rec)
  local args = {
    'XADD', K.events(c.tag), 'MAXLEN', '~', SETTINGS.events_maxlen, '*',
    't', kind, 'at', c.now, 'id', id, 'k', rec.execution_kind,
  }
  if rec.namespace ~= 'default' then
    args[#args + 1] = 'ns'
    args[#args + 1] = rec.namespace
  end
  if rec.lane_id ~= 'default' then
    args[#args + 1] = 'l'
    args[#args + 1] = rec.lane_id
  end
  return args
end

-- Appends one entry; `...` are further name, value pairs.
function events.emit(c, kind, id, rec, ...)
  local args = common(c, kind, id, rec)
  local extra = { ... }
  for i = 1, #extra, 2 do
    if extra[i + 1] then
      args[#args + 1] = extra[i]
      args[#args + 1] = extra[i + 1]
    end
  end
  local entry = server.call(unpack(args))
  if UNUSUAL[kind] or (kind == 'released' and UNUSUAL_RELEASE[extra[2]]) then
    local fields = { 'event_id', entry }
    for i = 7, #args do
      local value = args[i]
      fields[#fields + 1] = type(value) == 'number' and string.format('%.0f', value) or value
    end
    local key = K.history(c.tag, id)
    server.call('RPUSH', key, cmsgpack.pack(fields))
    server.call('LTRIM', key, -HISTORY_MAX, -1)
  end
end

function events.fence(rec) return rec.lease .. '/' .. rec.attempt end
