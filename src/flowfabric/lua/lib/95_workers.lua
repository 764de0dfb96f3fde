-- The worker registry of one namespace; its hash tag is the namespace.

function workers.event(tag, now, kind, worker_id, instance, reason)
  local args = { 'XADD', K.worker_events(tag), 'MAXLEN', '~', SETTINGS.events_maxlen, '*',
    'type', kind, 'at', now, 'worker_id', worker_id, 'worker_instance_id', instance }
  if reason then
    args[#args + 1] = 'reason'
    args[#args + 1] = reason
  end
  server.call(unpack(args))
end
