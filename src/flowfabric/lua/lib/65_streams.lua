-- Output streams of attempts: followers, and closing. A record has `streamed`, the last attempt
-- that wrote a frame, and `tailed`, the attempts with followers (`,0,1,`).

local WAKE_TTL_MS = 60000
local MAX_TAILED = 8

-- Provisional reasons, which the final end of the attempt replaces.
local PROVISIONAL = { lease_expired = true, lease_revoked = true }

local function is_tailed(rec, index)
  return rec.tailed and string.find(rec.tailed, ',' .. index .. ',', 1, true)
end

-- Closes the current attempt's stream and wakes its followers; replaces only a provisional reason.
function streams.close(c, id, rec, reason)
  if not (rec.streamed or rec.tailed) or not rec.attempt then return end
  local index = string.match(rec.attempt, '/(%d+)$')
  if rec.streamed == index then
    local meta = K.stream_meta(c.tag, id, index)
    local before = server.call('HGET', meta, 'closed_reason')
    if not before or (PROVISIONAL[before] and not PROVISIONAL[reason]) then
      server.call('HSET', meta, 'closed_at', c.now, 'closed_reason', reason)
    end
  end
  if is_tailed(rec, index) then
    local bell = K.stream_closed(c.tag, id, index)
    server.call('XADD', bell, 'MAXLEN', 1, '*', 'r', reason)
    server.call('PEXPIRE', bell, WAKE_TTL_MS)
  end
end

-- Notes a follower of this attempt; false if closing the stream will not wake it.
function streams.follow(c, id, rec, index)
  if is_tailed(rec, index) then return true end
  local current, kept = record.attempt_index(rec) or 0, {}
  if tonumber(index) < current then return false end
  for known in string.gmatch(rec.tailed or '', '%d+') do
    if tonumber(known) >= current then kept[#kept + 1] = known end
  end
  if #kept >= MAX_TAILED then return false end
  kept[#kept + 1] = index
  record.set(c, id, rec, 'tailed', ',' .. table.concat(kept, ',') .. ',')
  return true
end
