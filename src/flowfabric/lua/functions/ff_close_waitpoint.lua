-- ff_close_waitpoint: close a waitpoint; also what the expiry of pending ones does.
-- Keys: core, waitpoint, pending_waitpoint_expiry.
-- Arguments: execution_id or empty (scanner), waitpoint_id, reason, fence or empty,
--   only pending and due (0 | 1).
-- Replies: closed | already_closed | not_due | orphan_removed. Errors: waitpoint_not_found,
--   waitpoint_not_open, and those of the fence for lease holders. Events: none.
server.register_function('ff_close_waitpoint', function(keys, args)
  local c = Context.open(keys[1])
  local id, waitpoint_id, reason, text = args[1], args[2], args[3], args[4]
  local scanned = args[5] == '1'
  if text ~= '' then
    local rec = record.read(c, id)
    if not rec then return reply.err('execution_not_found') end
    local problem = fence.check(c, id, rec, text, false, false)
    if problem then return problem end
  end
  local found = server.call('HMGET', suspension.waitpoint(c, waitpoint_id), 'state', 'execution_id',
    'expires_at')
  local due = K.index(c.tag, 'pending_waitpoint_expiry')
  if not found[1] or (id ~= '' and found[2] ~= id) then
    if scanned then
      server.call('ZREM', due, waitpoint_id)
      return reply.ok('orphan_removed')
    end
    return reply.err('waitpoint_not_found')
  end
  if found[1] == 'closed' or found[1] == 'expired' then
    server.call('ZREM', due, waitpoint_id)
    return reply.ok('already_closed')
  end
  if found[1] ~= 'pending' and found[1] ~= 'active' then return reply.err('waitpoint_not_open') end
  if scanned then
    if found[1] ~= 'pending' then
      server.call('ZREM', due, waitpoint_id)
      return reply.ok('not_due')
    end
    if tonumber(found[3]) > c.now then return reply.ok('not_due') end
  end
  suspension.close_waitpoint(c, waitpoint_id, reason, reason, false)
  server.call('ZREM', due, waitpoint_id)
  return reply.ok('closed', found[1])
end)
