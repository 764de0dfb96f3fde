-- The worker registry of one namespace; its hash tag is the namespace. Partitions only know which
-- processes are being drained.

-- How long a partition refuses claims of a draining process before it must be told again.
local MARK_MS = 60000

function workers.event(tag, now, kind, worker_id, instance, reason)
  local args = { 'XADD', K.worker_events(tag), 'MAXLEN', '~', SETTINGS.events_maxlen, '*',
    't', kind, 'at', now, 'w', worker_id .. ' ' .. instance }
  values.add(args, 'r', reason)
  server.call(unpack(args))
end

-- Removes a process from the registry. Returns its worker id, empty if it was not listed, and
-- whether it was being drained.
function workers.forget(tag, instance)
  local worker_id = server.call('HGET', K.workers(tag), instance) or ''
  server.call('DEL', K.worker_alive(tag, instance), K.worker_record(tag, instance))
  server.call('HDEL', K.workers(tag), instance)
  return worker_id, server.call('ZREM', K.drains(tag), instance) == 1
end

-- Whether the partition gives nothing to a process.
function workers.is_draining(c, instance)
  local until_ms = server.call('ZSCORE', K.index(c.tag, 'draining'), instance)
  return until_ms and tonumber(until_ms) > c.now
end

function workers.mark_draining(c, instance)
  local key, until_ms = K.index(c.tag, 'draining'), c.now + MARK_MS
  server.call('ZADD', key, until_ms, instance)
  server.call('PEXPIRE', key, MARK_MS)
end
