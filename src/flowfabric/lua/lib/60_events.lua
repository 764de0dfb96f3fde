-- The partition's event feed, and the short list of unusual events per execution.
-- Stored names are short (decoded by engine/valkey/feeds.py): t type, id execution, k kind,
-- L lease, A attempt, w worker, ns namespace, l lane, f flow, at time. Defaults are left out, and so
-- is `at` if it equals the time in the entry's id.

local HISTORY_MAX = 32
-- Not built as a list first, which saves 0.7 µs per entry; a lifecycle has two.
local FREQUENT = { acquired = true, completion = true }
local function with(name, value, ...)
  if value then return name, value, ... end
  return ...
end
local UNUSUAL = { expired = true, revoked = true, reclaimed = true, replayed = true }
local UNUSUAL_RELEASE = { failed_retry_scheduled = true, suspend = true }

local function is_unusual(kind, fields)
  if kind ~= 'released' then return UNUSUAL[kind] end
  for i = 1, #fields, 2 do
    if fields[i] == 'r' then return UNUSUAL_RELEASE[fields[i + 1]] end
  end
end

-- Only the first entry of a call trims the feed: trimming takes a tenth of the time of an entry.
local function append(c, ...)
  if c.trimmed then return server.call('XADD', K.events(c.tag), '*', ...) end
  c.trimmed = true
  return server.call('XADD', K.events(c.tag), 'MAXLEN', '~', SETTINGS.events_maxlen, '*', ...)
end

-- Appends one entry; `...` are further name, value pairs, none of them nil or false.
function events.emit(c, kind, id, rec, ...)
  local namespace = rec.namespace ~= 'default' and rec.namespace
  local lane = rec.lane_id ~= 'default' and rec.lane_id
  local at = clock.shifted and c.now
  if FREQUENT[kind] then
    if namespace or lane or rec.flow_id or at then
      append(c, 't', kind, 'id', id, 'k', rec.execution_kind, with('ns', namespace,
        with('l', lane, with('f', rec.flow_id, with('at', at, ...)))))
    else
      append(c, 't', kind, 'id', id, 'k', rec.execution_kind, ...)
    end
    return
  end
  local fields = { 't', kind, 'id', id, 'k', rec.execution_kind, with('ns', namespace,
    with('l', lane, with('f', rec.flow_id, with('at', at, ...)))) }
  local entry = append(c, unpack(fields))
  if is_unusual(kind, fields) then
    local details = { 'event_id', entry }
    for i = 1, #fields do
      local value = fields[i]
      details[#details + 1] = type(value) == 'number' and values.text(value) or value
    end
    local key = K.history(c.tag, id)
    server.call('RPUSH', key, cmsgpack.pack(details))
    server.call('LTRIM', key, -HISTORY_MAX, -1)
  end
end

-- Appends an entry about a flow.
function events.emit_flow(c, kind, flow_id, f, ...)
  local fields = { 't', kind, 'f', flow_id, ... }
  if f.namespace ~= 'default' then values.add(fields, 'ns', f.namespace) end
  if clock.shifted then values.add(fields, 'at', c.now) end
  append(c, unpack(fields))
end

-- Appends an entry about a budget or a quota policy to the feed of its partition.
function events.emit_operator(tag, now, kind, ...)
  local args = {
    'XADD', K.events(tag), 'MAXLEN', '~', SETTINGS.events_maxlen, '*', 't', kind, ...
  }
  if clock.shifted then values.add(args, 'at', now) end
  server.call(unpack(args))
end

function events.emit_lease(c, kind, id, rec, ...)
  return events.emit(c, kind, id, rec, 'L', rec.lease, 'A', rec.attempt, 'w', rec.worker, ...)
end
