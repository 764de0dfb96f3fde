-- ff_ack_message: drop a message to another partition that was delivered, unless it was replaced.
-- Keys: subflow_outbox. Arguments: name, first line of the message, its length in bytes.
-- Replies: messages left. Errors: none. Events: none.
register('ff_ack_message', function(keys, args)
  local key = K.index(keys[1], 'subflow_outbox')
  local stored = server.call('HGET', key, args[1])
  if stored and #stored == tonumber(args[3]) and string.sub(stored, 1, #args[2]) == args[2] then
    server.call('HDEL', key, args[1])
  end
  return reply.ok(server.call('HLEN', key))
end, { 'allow-oom' })
