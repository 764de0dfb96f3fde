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

-- The namespaces that a process serves, separated by spaces; `*` stands for all.
function workers.served(tag, instance)
  return server.call('HGET', K.worker_record(tag, instance), 'namespaces') or string.sub(tag, 2, -2)
end

-- Drains a process: until `ends_at` it keeps the leases that it holds.
function workers.drain(tag, instance, ends_at)
  local served = workers.served(tag, instance)
  server.call('HSET', K.drains(tag), instance, ends_at .. ' ' .. served)
  return served
end

-- Ends the drain of a process. Returns the namespaces in which it was drained, or nil.
function workers.undrain(tag, instance)
  local drain = server.call('HGET', K.drains(tag), instance)
  server.call('HDEL', K.drains(tag), instance)
  return drain and string.match(drain, ' (.*)$')
end

-- Removes a process from the registry. Returns its worker id, empty if it was not listed, and the
-- namespaces in which it was being drained, or nil.
function workers.forget(tag, instance)
  local worker_id = server.call('HGET', K.workers(tag), instance) or ''
  server.call('DEL', K.worker_alive(tag, instance), K.worker_record(tag, instance))
  server.call('HDEL', K.workers(tag), instance)
  return worker_id, workers.undrain(tag, instance)
end

-- The marks of a process in a partition: until when it gets no work of each namespace. Processes of
-- different namespaces may share an instance id; a drain concerns only the namespaces that the drained
-- one serves.
local function marks_of(c, instance)
  local marks = {}
  local stored = server.call('HGET', K.index(c.tag, 'draining'), instance) or ''
  for namespace, until_ms in string.gmatch(stored, '(%S+) (%d+)') do
    if tonumber(until_ms) > c.now then marks[namespace] = until_ms end
  end
  return marks
end

-- The namespaces whose work a process does not get here; nil if there are none.
function workers.drained_in(c, worker)
  local marks = marks_of(c, record.instance_of(worker))
  return next(marks) and marks
end

-- Whether the partition does not give an execution to a worker because it is being drained.
function workers.is_drained(c, worker, rec)
  local marks = workers.drained_in(c, worker)
  return marks and (marks['*'] or marks[rec.namespace])
end

-- Refuses a process the work of these namespaces (separated by spaces), or allows it again.
function workers.mark(c, instance, namespaces, refuse)
  local key, marks, stored = K.index(c.tag, 'draining'), marks_of(c, instance), {}
  for namespace in string.gmatch(namespaces, '%S+') do
    marks[namespace] = refuse and values.text(c.now + MARK_MS) or nil
  end
  for namespace, until_ms in pairs(marks) do stored[#stored + 1] = namespace .. ' ' .. until_ms end
  if #stored == 0 then return server.call('HDEL', key, instance) end
  server.call('HSET', key, instance, table.concat(stored, ' '))
  server.call('PEXPIRE', key, MARK_MS)
end

-- How many leases of these namespaces a process holds in the partition.
function workers.held(c, instance, namespaces)
  local leases, served, held = server.call('SMEMBERS', K.worker_leases(c.tag, instance)), {}, 0
  for namespace in string.gmatch(namespaces, '%S+') do served[namespace] = true end
  if served['*'] then return #leases end
  for _, id in ipairs(leases) do
    if served[server.call('HGET', K.core(c.tag, id), 'namespace') or 'default'] then held = held + 1 end
  end
  return held
end
