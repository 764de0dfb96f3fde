-- ff_ack_message: drop a message to another partition that was delivered, unless it was replaced.
-- Keys: subflow_outbox. Arguments: name, SHA-1 of the message as hex.
-- Replies: messages left. Errors: none. Events: none.
register('ff_ack_message', function(keys, args)
  local key = K.index(keys[1], 'subflow_outbox')
  local stored = server.call('HGET', key, args[1])
  if stored and server.sha1hex(stored) == args[2] then server.call('HDEL', key, args[1]) end
  return reply.ok(server.call('HLEN', key))
end, { 'allow-oom' })
