-- ff_drain_flow_cancel: cancel more members of a cancelled flow, as many as one call may.
-- Keys: flow core, members, cancel_backlog, and those of ff_cancel for each member.
-- Arguments: flow_id. Replies: cancelled, settled, left. Errors: none (a flow that is gone leaves
--   the backlog). Events: completion (each member), flow_finished.
register('ff_drain_flow_cancel', function(keys, args)
  local c, flow_id = Context.open(keys[1], true), args[1]
  local backlog = K.index(c.tag, 'cancel_backlog')
  if not server.call('ZSCORE', backlog, flow_id) then return reply.ok(0, 0, 0) end
  if not flow.read(c, flow_id) then
    server.call('ZREM', backlog, flow_id)
    return reply.ok(0, 0, 0)
  end
  local cancelled, settled, left = flow_cancel.drain(c, flow_id)
  c:close()
  return reply.ok(cancelled, settled, left)
end, { 'allow-oom' })
