-- The worker registry of one namespace; its hash tag is the namespace.

function workers.event(tag, now, kind, worker_id, instance, reason)
  local args = { 'XADD', K.worker_events(tag), 'MAXLEN', '~', SETTINGS.events_maxlen, '*',
    't', kind, 'at', now, 'w', worker_id .. ' ' .. instance }
  values.add(args, 'r', reason)
  server.call(unpack(args))
end
