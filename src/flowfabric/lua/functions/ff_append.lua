-- ff_append: the lease holder adds frames to its attempt's stream, all or nothing.
-- Keys: core (read), stream, stream meta, attempt summary.
-- Arguments: execution_id, lease (`id/epoch`), attempt (`id/index`), mode, retention maxlen or empty,
--   mode settings (msgpack map), seq of the last frame or empty, then per frame: type, payload,
--   extra fields (msgpack flat list or empty). No frame at all only checks the fence.
-- Replies: entry ids, frame_count, summary version or empty, duplicate (0 | 1).
-- Errors: stream_closed, stale_owner_cannot_append; invariant_violation (summary_conflict,
--   version, document) when the document has moved on: merge again. Events: none.
local DEFAULT_MAXLEN = 10000
local SUMMARY_KEEP = 64

local function refusal(c, core, held, attempt)
  local found = server.call('HMGET', core, 'state', 'lease', 'attempt', 'lease_expires_at',
    'streamed', 'stream_maxlen')
  local state = found[1]
  if not state or S.phase(state) ~= 'a' then return nil, reply.err('stream_closed') end
  if state ~= S.ACTIVE or tonumber(found[4]) <= c.now or found[2] ~= held
      or string.match(found[3], '/(%d+)$') ~= string.match(attempt, '/(%d+)$') then
    return nil, reply.err('stale_owner_cannot_append')
  end
  return found
end

-- How many entries a best-effort append keeps, from the rate seen so far.
local function best_effort_keep(meta, want, now)
  local seconds = math.max(want.ttl_ms or 0, 1) / 1000
  local rate = want.floor / (seconds * 2)
  if meta.ema_rate_hz and meta.last_append_ts_ms then
    local gap = math.max(1, now - tonumber(meta.last_append_ts_ms))
    rate = want.alpha * (1000 / gap) + (1 - want.alpha) * tonumber(meta.ema_rate_hz)
  end
  local keep = math.min(want.ceiling, math.max(want.floor, math.ceil(rate * seconds * 2)))
  return keep, rate
end

local function trim(stream, meta, mode, maxlen, keep)
  local durable = meta.durable_maxlen and tonumber(meta.durable_maxlen)
  if mode == 'durable' then
    if maxlen > 0 then
      server.call('XTRIM', stream, 'MAXLEN', '=', maxlen)
    else
      server.call('XTRIM', stream, 'MAXLEN', '~', DEFAULT_MAXLEN)
    end
  elseif durable then
    -- Frames that were meant to stay are not pushed out by others.
    server.call('XTRIM', stream, 'MAXLEN', '~', math.max(durable, keep))
  else
    server.call('XTRIM', stream, 'MAXLEN', '~', keep)
  end
end

local function summary_conflict(key, want)
  local stored = server.call('HMGET', key, 'version', 'document')
  if tonumber(stored[1] or 0) ~= want.version - 1 then
    return reply.err('invariant_violation', 'summary_conflict', stored[1] or '0', stored[2] or '{}')
  end
end

local function write_summary(c, key, want)
  server.call('HSET', key, 'document', want.document, 'version', want.version,
    'patch_kind', 'json-merge-patch', 'last_updated_ms', c.now)
  server.call('HSETNX', key, 'first_applied_ms', c.now)
end

server.register_function('ff_append', function(keys, args)
  local c = Context.open(keys[1])
  local id, held, attempt, mode = args[1], args[2], args[3], args[4]
  local core = K.core(c.tag, id)
  local found, problem = refusal(c, core, held, attempt)
  if problem then return problem end
  local index = string.match(attempt, '/(%d+)$')
  local stream, meta_key = streams.key(c, id, index), streams.meta(c, id, index)
  local meta = suspension.read_hash(meta_key) or {}
  if meta.closed_at then return reply.err('stream_closed') end
  if not args[8] then return reply.ok({}, tonumber(meta.frame_count or 0), '', 0) end
  if args[7] ~= '' and tonumber(meta.last_seq or 0) >= tonumber(args[7]) then
    local same = meta.last_seq == args[7]
    return reply.ok({ same and meta.last_sequence or '' }, tonumber(meta.frame_count), '', 1)
  end
  local want = args[6] ~= '' and cmsgpack.unpack(args[6]) or {}
  local summary = K.attempt(c.tag, id, index) .. ':summary'
  if mode == 'summary' then
    problem = summary_conflict(summary, want)
    if problem then return problem end
  end

  local ids, size = {}, 0
  for i = 8, #args, 3 do
    local entry = { 'XADD', stream, '*', 't', args[i], 'p', args[i + 1] }
    size = size + #args[i + 1]
    local function add(name, value)
      entry[#entry + 1] = name
      entry[#entry + 1] = value
    end
    if mode ~= 'durable' then add('m', mode) end
    if mode == 'summary' then add('v', want.version) end
    if mode == 'best_effort' and want.ttl_ms > 0 then add('ttl', want.ttl_ms) end
    if args[i + 2] ~= '' then
      for _, value in ipairs(cmsgpack.unpack(args[i + 2])) do entry[#entry + 1] = value end
    end
    ids[#ids + 1] = server.call(unpack(entry))
  end
  local maxlen = tonumber(args[5] ~= '' and args[5] or found[6] or 0)
  local update = {
    'HSET', meta_key, 'frame_count', tonumber(meta.frame_count or 0) + #ids,
    'total_bytes', tonumber(meta.total_bytes or 0) + size, 'last_sequence', ids[#ids],
    'last_frame_at', c.now,
  }
  local function set(name, value)
    update[#update + 1] = name
    update[#update + 1] = value
  end
  if not meta.created_at then
    set('created_at', c.now)
    set('attempt', attempt)
    set('retention_maxlen', maxlen)
    server.call('HSET', core, 'streamed', index)
  end
  if args[7] ~= '' then set('last_seq', args[7]) end
  local keep = SUMMARY_KEEP
  if mode == 'best_effort' then
    local rate
    keep, rate = best_effort_keep(meta, want, c.now)
    set('ema_rate_hz', rate)
    set('last_append_ts_ms', c.now)
    set('maxlen_applied_last', keep)
  elseif meta.has_durable_frame ~= '1' then
    set('has_durable_frame', '1')
    server.call('PERSIST', stream)
  end
  if mode == 'durable' then set('durable_maxlen', maxlen > 0 and maxlen or DEFAULT_MAXLEN) end
  server.call(unpack(update))
  if mode == 'summary' then write_summary(c, summary, want) end
  trim(stream, meta, mode, maxlen, keep)
  if mode == 'best_effort' and meta.has_durable_frame ~= '1' and (want.ttl_ms or 0) > 0 then
    server.call('PEXPIRE', stream, 2 * want.ttl_ms)
  end
  return reply.ok(ids, tonumber(meta.frame_count or 0) + #ids,
    mode == 'summary' and tostring(want.version) or '', 0)
end)
