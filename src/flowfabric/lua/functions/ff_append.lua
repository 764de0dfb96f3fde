-- ff_append: the lease holder adds frames to its attempt's stream, all or nothing.
-- Keys: core, stream, stream meta, attempt summary.
-- Arguments: execution_id, lease (`id/epoch`), attempt (`id/index`), mode (d | s | b), retention
--   maxlen or empty, mode settings (msgpack map) or empty, seq of the last frame or empty, then
--   per frame: type, payload, extra fields (msgpack flat list or empty). Without frames it only
--   checks the fence.
-- Replies: number written, last entry id, frame_count, summary version or empty, duplicate (0 | 1);
--   or 0, then version and document of a summary that is not the one the patch was merged into.
-- Errors: stream_closed, stale_owner_cannot_append. Events: none.
local DEFAULT_MAXLEN = 10000
local LARGEST_MAXLEN = 4294967295
local SUMMARY_KEEP = 64

local function fenced(c, core, held, index)
  local found = server.call('HMGET', core, 'state', 'lease', 'attempt', 'lease_expires_at',
    'stream_maxlen')
  local state = found[1]
  if not state or not S.is_active(state) then reply.refuse('stream_closed') end
  if state ~= S.ACTIVE or tonumber(found[4]) <= c.now or found[2] ~= held
      or string.match(found[3], '/(%d+)$') ~= index then
    reply.refuse('stale_owner_cannot_append')
  end
  return found
end

-- Whether seq `a` is at most `b`. Decimal texts, since 64 bits do not fit a Lua number.
local function at_most(a, b) return #a < #b or (#a == #b and a <= b) end

-- The answer for a seq that was accepted before; `seen` is `seq last_id count version`.
local function duplicate(seen, seq, count)
  local known, id, written, version = string.match(seen, '^(%S+) (%S+) (%S+) ?(.*)$')
  if not at_most(seq, known) then return nil end
  if seq ~= known then return reply.ok(0, '', tonumber(count), '', 1) end
  return reply.ok(tonumber(written), id, tonumber(count), version, 1)
end

local function best_effort_keep(rate, last, want, now, frames)
  local seconds = math.max(want.ttl_ms, 1) / 1000
  local gap = last and math.max(1, now - tonumber(last)) or 1
  if not rate then rate, frames = want.floor / (seconds * 2), frames - 1 end
  for _ = 1, frames do
    rate = want.alpha * (1000 / gap) + (1 - want.alpha) * tonumber(rate)
    gap = 1
  end
  return math.min(want.ceiling, math.max(want.floor, math.ceil(rate * seconds * 2))), rate
end

-- Trim operator and length of this append; `durable` is the limit that durable frames set.
local function limit(mode, maxlen, keep, durable)
  if mode == 'd' then
    if maxlen > 0 then return '=', maxlen end
    return '~', DEFAULT_MAXLEN
  end
  -- Other frames must not push out durable ones.
  return '~', math.max(keep, tonumber(durable or 0))
end

-- A stream that expired must not use the ids of its first life again.
local function continue_after(stream, last)
  if server.call('EXISTS', stream) == 1 then return end
  server.call('XADD', stream, last, 't', '')
  server.call('XDEL', stream, last)
end

local function shared_fields(mode, want)
  if mode == 'd' then return {} end
  if mode == 's' then return { 'm', 's', 'v', false } end
  if want.ttl_ms > 0 then return { 'm', 'b', 'ttl', want.ttl_ms } end
  return { 'm', 'b' }
end

-- Adds every frame; the last one also trims. Returns the last id, the number and the bytes.
local function write(stream, args, shared, version, op, maxlen)
  local size, count, id = 0, 0, nil
  for i = 8, #args, 3 do
    local entry = { 'XADD', stream, '*', 't', args[i], 'p', args[i + 1] }
    if i + 3 > #args then
      entry = { 'XADD', stream, 'MAXLEN', op, maxlen, '*', 't', args[i], 'p', args[i + 1] }
    end
    size, count = size + #args[i + 1], count + 1
    if version then shared[4] = version + count end
    values.append(entry, shared)
    if args[i + 2] ~= '' then values.append(entry, cmsgpack.unpack(args[i + 2])) end
    id = server.call(unpack(entry))
  end
  return id, count, size
end

reply.register_function('ff_append', function(c, id, args)
  local mode, seq = args[4], args[7]
  local core, index = K.core(c.tag, id), string.match(args[3], '/(%d+)$')
  local found = fenced(c, core, args[2], index)
  local stream, meta_key = K.stream(c.tag, id, index), K.stream_meta(c.tag, id, index)
  local meta = server.call('HMGET', meta_key, 'closed_at', 'frame_count', 'total_bytes', 'durable',
    'seen', 'ema_rate_hz', 'last_append_ts_ms', 'last_sequence')
  if meta[1] then return reply.err('stream_closed') end
  local before, durable = tonumber(meta[2] or 0), meta[4]
  reply.stop_with(seq ~= '' and meta[5] and duplicate(meta[5], seq, before))
  if not args[8] then return reply.ok(0, '', before, '', 0) end
  local want = args[6] ~= '' and cmsgpack.unpack(args[6]) or nil
  local summary, version
  if mode == 's' then
    summary = K.summary(c.tag, id, index)
    local stored = server.call('HMGET', summary, 'version', 'document')
    version = tonumber(stored[1] or 0)
    if version ~= want.version then return reply.ok(0, version, stored[2] or '{}') end
  end

  local update = { 'HSET', meta_key }
  local maxlen = math.min(LARGEST_MAXLEN, tonumber(args[5] ~= '' and args[5] or found[5] or 0))
  local keep = SUMMARY_KEEP
  if mode == 'b' then
    local rate
    keep, rate = best_effort_keep(meta[6], meta[7], want, c.now, (#args - 7) / 3)
    values.append(update,
      { 'ema_rate_hz', rate, 'last_append_ts_ms', c.now, 'maxlen_applied_last', keep })
  end
  if meta[2] and not durable then continue_after(stream, meta[8]) end
  local op, length = limit(mode, maxlen, keep, durable)
  local last, count, size = write(stream, args, shared_fields(mode, want), version, op, length)
  values.add(update, 'frame_count', before + count)
  values.add(update, 'total_bytes', tonumber(meta[3] or 0) + size)
  values.add(update, 'last_sequence', last)
  if version then version = version + count end
  if seq ~= '' then
    values.add(update, 'seen', seq .. ' ' .. last .. ' ' .. count .. (version and ' ' .. version or ''))
  end
  -- `durable`: absent before the first frame that must stay, 0 while all are summary patches.
  local stays = mode == 'd' and (maxlen > 0 and maxlen or DEFAULT_MAXLEN) or (durable or 0)
  if mode ~= 'b' and tostring(stays) ~= durable then values.add(update, 'durable', stays) end
  if not meta[2] then
    values.append(update, { 'created_at', c.now, 'attempt', args[3], 'retention_maxlen', maxlen })
    server.call('HSET', core, 'streamed', index)
  end
  server.call(unpack(update))
  if mode == 's' then
    server.call('HSET', summary, 'document', want.document, 'version', version,
      'patch_kind', 'json-merge-patch', 'last_updated_ms', c.now)
    server.call('HSETNX', summary, 'first_applied_ms', c.now)
  end
  if not durable then
    if mode == 'b' and want.ttl_ms > 0 then
      server.call('PEXPIRE', stream, 2 * want.ttl_ms)
    elseif meta[2] then
      server.call('PERSIST', stream)
    end
  end
  return reply.ok(count, last, before + count, version and tostring(version) or '', 0)
end, {})
