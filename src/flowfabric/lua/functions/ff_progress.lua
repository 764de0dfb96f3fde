-- ff_progress: the lease holder reports its progress. No state change, no event.
-- Keys: core. Arguments: execution_id, fence, percent or empty, message flag (0 | 1), message.
-- Replies: nothing. Errors: execution_not_found, execution_not_active, lease_revoked,
--   lease_expired (not marked), stale_lease. Events: none.
record.register_function('ff_progress', record.checked_lease, function(c, id, rec, args)
  reply.stop_with(fence.lease_problem(c, id, rec) or fence.mismatch(rec, fence.parse(args[2])))
  local update = { 'HSET', K.core(c.tag, id), 'progress_updated_at', c.now, 'last_mutation_at', c.now }
  values.add(update, 'progress_pct', args[3])
  if args[4] == '1' then record.add_or_clear(c, id, rec, update, 'progress_message', args[5]) end
  server.call(unpack(update))
  return reply.ok()
end, { 'allow-oom' })
