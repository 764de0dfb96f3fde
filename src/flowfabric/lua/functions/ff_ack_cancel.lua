-- ff_ack_cancel: note that a member of a cancelled flow needs no cancel any more.
-- Keys: flow core, cancel_backlog, cascade_failed, cascade_poison. Arguments: flow_id, execution_id.
-- Replies: members left to cancel. Errors: none. Events: none.
register('ff_ack_cancel', function(keys, args)
  local c, flow_id = Context.open(keys[1]), args[1]
  local name = 'c|' .. flow_id .. '|' .. edges.uuid_of(args[2])
  server.call('HDEL', K.index(c.tag, 'cascade_failed'), name)
  server.call('HDEL', K.index(c.tag, 'cascade_poison'), name)
  local f = flow.read(c, flow_id)
  local left = f and flow.is_cancelled(f) and flow_cancel.owed(f) or 0
  if left == 0 then server.call('ZREM', K.index(c.tag, 'cancel_backlog'), flow_id) end
  return reply.ok(left)
end, { 'allow-oom' })
