-- ff_stream_read: frames of one range, and whether the stream is closed.
-- Keys: stream, stream meta, core, attempt. Arguments: execution_id, attempt index, first, last,
--   count, visibility (empty | exclude_best_effort), follow (1: the caller will wait for the next
--   frame).
-- Replies: entries, last id examined or nothing, more to examine (0 | 1), closed_at or nothing,
--   closed_reason or nothing, whether frames were trimmed (0 | 1), oldest retained id or nothing,
--   last id ever or nothing, followed (0 | 1). Errors: corruption. Events: none.
local CLOSED_BY_STATE = {
  ended_success = 'attempt_success', ended_failure = 'attempt_failure',
  ended_cancelled = 'attempt_cancelled', interrupted_reclaimed = 'reclaimed',
}
local CLOSED_BY_OUTCOME = {
  s = 'attempt_success', f = 'attempt_failure', c = 'attempt_cancelled', x = 'expired',
  k = 'dependency_impossible',
}
-- More precise than the outcome.
local CLOSED_BY_WHOM = {
  expire = 'expired', reclaim_cap = 'max_reclaims_exceeded',
  suspension_timeout = 'suspension_timeout',
}
-- Entries and bytes that one call reads at most, and the entries read first: the largest frames
-- must fit, and small ones should need few commands.
local MAX_EXAMINED, MAX_BYTES, FIRST_CHUNK = 1000, 1048576, 16

-- How an attempt that never wrote a frame ended, if it did.
local function ended_silently(c, id, index, rec)
  local archived = server.call('HMGET', K.attempt(c.tag, id, index),
    'attempt_state', 'ended_at', 'ended_by')
  if archived[1] then
    return archived[2], CLOSED_BY_WHOM[archived[3]] or CLOSED_BY_STATE[archived[1]]
  end
  if not rec or record.attempt_index(rec) ~= tonumber(index) then return nil end
  if S.is_terminal(rec.state) then
    return rec.completed_at,
      CLOSED_BY_WHOM[rec.ended_by] or CLOSED_BY_OUTCOME[S.outcome(rec.state)]
  end
  if S.is_lease_expired(rec.state) then return rec.lease_expired_at, 'lease_expired' end
  if S.is_lease_revoked(rec.state) then return rec.lease_revoked_at, 'lease_revoked' end
end

local function is_best_effort(entry) return entry[2][5] == 'm' and entry[2][6] == 'b' end

-- Visible entries, the last one examined, and whether there may be more.
local function examine(stream, first, last, count, filtered)
  local visible, examined, seen, bytes, chunk = {}, false, 0, 0, FIRST_CHUNK
  while true do
    if not filtered then chunk = math.min(chunk, count - #visible) end
    local entries = server.call('XRANGE', stream, first, last, 'COUNT', chunk)
    for _, entry in ipairs(entries) do
      examined, bytes = entry[1], bytes + values.bytes(entry[2], 1)
      if not (filtered and is_best_effort(entry)) then
        visible[#visible + 1] = entry
        if #visible == count then return visible, examined, 0 end
      end
    end
    if #entries < chunk then return visible, examined, 0 end
    seen, first = seen + chunk, '(' .. examined
    if seen >= MAX_EXAMINED or bytes >= MAX_BYTES then return visible, examined, 1 end
    chunk = math.floor(math.min(MAX_EXAMINED - seen, (MAX_BYTES - bytes) * seen / bytes) + 1)
  end
end

-- `end` as the first and `start` as the last position name one entry each.
local function resolve(stream, first, last)
  local newest = first == '+' and server.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  local oldest = last == '-' and server.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  return newest and newest[1] or first, oldest and oldest[1] or last
end

reply.register_function('ff_stream_read', function(c, id, args)
  local index, follow = args[2], args[7] == '1'
  local stream = K.stream(c.tag, id, index)
  local first, last = resolve(stream, args[3], args[4])
  local entries, examined, more = examine(stream, first, last, tonumber(args[5]), args[6] ~= '')
  local meta = server.call('HMGET', K.stream_meta(c.tag, id, index), 'closed_at', 'closed_reason',
    'frame_count', 'last_sequence')
  local closed_at, reason, followed = meta[1], meta[2], false
  if not closed_at and (not meta[3] or follow) then
    local rec = record.read(c, id)
    if not meta[3] then closed_at, reason = ended_silently(c, id, index, rec) end
    if follow and rec and not closed_at then followed = streams.follow(c, id, rec, index) end
  end
  local trimmed = tonumber(meta[3] or 0) > server.call('XLEN', stream)
  local oldest = trimmed and server.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  return reply.ok(entries, examined, more, closed_at or false, reason or false, trimmed and 1 or 0,
    oldest and oldest[1] or false, meta[4] or false, followed and 1 or 0)
end, { 'allow-oom' })
