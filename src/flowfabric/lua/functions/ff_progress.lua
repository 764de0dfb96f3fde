-- ff_progress: the lease holder's note on how far it is. No state change, no event.
-- Keys: core. Arguments: execution_id, fence, percent or empty, message flag (0 | 1), message.
-- Replies: nothing. Errors: execution_not_found, execution_not_active, lease_revoked,
--   lease_expired (not marked), stale_lease. Events: none.
reply.register_function('ff_progress', function(keys, args)
  local c = Context.open(keys[1])
  local id, given = args[1], fence.parse(args[2])
  local rec = record.checked_lease(c, id)
  if not rec then return reply.err('execution_not_found') end
  if not S.is_active(rec.state) then return reply.not_active(rec) end
  if S.is_lease_revoked(rec.state) then return reply.err('lease_revoked') end
  if S.is_lease_expired(rec.state) or tonumber(rec.lease_expires_at) <= c.now then
    return reply.err('lease_expired')
  end
  if given.lease_id ~= record.lease_id(rec) or tonumber(given.epoch) ~= record.epoch(rec)
      or (given.attempt_id ~= '' and given.attempt_id ~= record.attempt_id(rec))
      or (given.index ~= '' and tonumber(given.index) ~= record.attempt_index(rec)) then
    return reply.err('stale_lease')
  end
  local update = { 'HSET', K.core(c.tag, id), 'progress_updated_at', c.now, 'last_mutation_at', c.now }
  if args[3] ~= '' then
    update[#update + 1] = 'progress_pct'
    update[#update + 1] = args[3]
  end
  if args[4] == '1' and args[5] == '' then
    record.clear(c, id, rec, 'progress_message')
  elseif args[4] == '1' then
    update[#update + 1] = 'progress_message'
    update[#update + 1] = args[5]
  end
  server.call(unpack(update))
  return reply.ok()
end, { 'allow-oom' })
