-- ff_close_waitpoint: close a waitpoint by hand.
-- Keys: core, waitpoint, pending_waitpoint_expiry.
-- Arguments: execution_id, waitpoint_id, reason, fence or empty.
-- Replies: closed, its state before | already_closed. Errors: waitpoint_not_found,
--   waitpoint_not_open; for lease holders execution_not_found and those of the fence. Events: none.
reply.register_function('ff_close_waitpoint', function(c, id, args)
  local waitpoint_id, text = args[2], args[4]
  if text ~= '' then
    local rec = record.read(c, id)
    if not rec then return reply.err('execution_not_found') end
    reply.stop_with(fence.check(c, id, rec, text, false, false))
  end
  local found = server.call('HMGET', K.waitpoint(c.tag, waitpoint_id), 'state', 'execution_id')
  local state = found[1]
  if not state or found[2] ~= id then return reply.err('waitpoint_not_found') end
  if state == 'closed' or state == 'expired' then return reply.ok('already_closed') end
  if state ~= 'pending' and state ~= 'active' then return reply.err('waitpoint_not_open') end
  suspension.close_waitpoint(c, waitpoint_id, args[3])
  suspension.forget_pending(c, id, waitpoint_id)
  return reply.ok('closed', state)
end, { 'allow-oom' })
