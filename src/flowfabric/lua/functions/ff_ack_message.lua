-- ff_ack_message: drop a message to another partition that was delivered, unless it was replaced; or
-- note that it could not be delivered, and set it aside after some failures.
-- Keys: subflow_outbox, subflow_parked, cascade_failed, cascade_poison.
-- Arguments: name, first line of the message, its length in bytes, why it was refused or empty.
-- Replies: messages left. Errors: none. Events: none.
register('ff_ack_message', function(keys, args)
  local c, name, why = Context.open(keys[1]), args[1], args[4]
  local key = K.index(c.tag, 'subflow_outbox')
  local stored = server.call('HGET', key, name)
  if stored and #stored == tonumber(args[3]) and string.sub(stored, 1, #args[2]) == args[2] then
    if why ~= '' then
      subflows.note_failure(c, name, stored, why)
    else
      server.call('HDEL', key, name)
      subflows.forget_failures(c, name)
    end
  end
  return reply.ok(server.call('HLEN', key))
end, { 'allow-oom' })
