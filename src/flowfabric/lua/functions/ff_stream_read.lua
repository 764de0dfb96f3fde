-- ff_stream_read: frames of one range and whether the stream is closed, at one moment.
-- Keys: stream, stream meta, core, attempt. Arguments: execution_id, attempt index, first, last,
--   count, follow (1 also notes that somebody will wait for the next frame).
-- Replies: entries, closed_at or nothing, closed_reason or nothing, frame_count, retained count,
--   oldest retained id or nothing. Errors: none. Events: none.
local CLOSED_BY = {
  ended_success = 'attempt_success', ended_failure = 'attempt_failure',
  ended_cancelled = 'attempt_cancelled', interrupted_reclaimed = 'reclaimed',
}
local CLOSED_BY_OUTCOME = {
  s = 'attempt_success', f = 'attempt_failure', c = 'attempt_cancelled', x = 'expired',
}

-- How an attempt that never wrote a frame ended, if it did.
local function ended_silently(c, id, index, rec)
  local archived = server.call('HMGET', K.attempt(c.tag, id, index), 'attempt_state', 'ended_at')
  if archived[1] then return tonumber(archived[2]), CLOSED_BY[archived[1]] end
  if not rec or record.attempt_index(rec) ~= tonumber(index) then return nil end
  local phase, ownership = S.phase(rec.state), S.ownership(rec.state)
  if phase == 't' then
    return tonumber(rec.completed_at), CLOSED_BY_OUTCOME[S.outcome(rec.state)]
  end
  if ownership == 'x' then return tonumber(rec.lease_expired_at), 'lease_expired' end
  if ownership == 'v' then return tonumber(rec.lease_revoked_at), 'lease_revoked' end
end

server.register_function('ff_stream_read', function(keys, args)
  local c = Context.open(keys[1])
  local id, index = args[1], args[2]
  local stream = streams.key(c, id, index)
  local entries = server.call('XRANGE', stream, args[3], args[4], 'COUNT', args[5])
  local meta = server.call('HMGET', streams.meta(c, id, index), 'closed_at', 'closed_reason',
    'frame_count')
  local closed_at, reason = tonumber(meta[1]), meta[2]
  if not closed_at and (not meta[3] or args[6] == '1') then
    local rec = record.read(c, id)
    if not meta[3] then closed_at, reason = ended_silently(c, id, index, rec) end
    if args[6] == '1' and rec and not closed_at and rec.tailed ~= index
        and (not rec.attempt or record.attempt_index(rec) <= tonumber(index)) then
      server.call('HSET', K.core(c.tag, id), 'tailed', index)
    end
  end
  local first = server.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  return reply.ok(entries, closed_at or false, reason or false, tonumber(meta[3] or 0),
    server.call('XLEN', stream), first and first[1] or false)
end)
