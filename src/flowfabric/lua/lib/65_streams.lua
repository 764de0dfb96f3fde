-- Output streams of attempts: how they end. A record carries `streamed`, the last attempt
-- that wrote a frame, and `tailed`, the last one somebody follows; others cost nothing.
local streams = {}

local WAKE_TTL_MS = 60000

function streams.key(c, id, index) return 'ff:stream:' .. c.tag .. ':' .. id .. ':' .. index end
function streams.meta(c, id, index) return streams.key(c, id, index) .. ':meta' end
function streams.closed(c, id, index) return streams.key(c, id, index) .. ':closed' end

-- Closes the current attempt's stream and wakes its followers. Closed stays closed, unless
-- a reclaim says better what became of the attempt.
function streams.close(c, id, rec, reason, overwrite)
  if not (rec.streamed or rec.tailed) or not rec.attempt then return end
  local index = string.match(rec.attempt, '/(%d+)$')
  if rec.streamed == index then
    local meta = streams.meta(c, id, index)
    if overwrite or not server.call('HGET', meta, 'closed_at') then
      server.call('HSET', meta, 'closed_at', c.now, 'closed_reason', reason)
    end
  end
  if rec.tailed == index then
    local bell = streams.closed(c, id, index)
    server.call('XADD', bell, 'MAXLEN', 1, '*', 'r', reason)
    server.call('PEXPIRE', bell, WAKE_TTL_MS)
  end
end
