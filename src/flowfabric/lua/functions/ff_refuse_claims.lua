-- ff_refuse_claims: give no more work of a partition to worker processes, or give it again.
-- Keys: draining, worker leases. Arguments: 1 to refuse | 0 to give again, then per process: instance.
-- Replies: number of leases that they hold here. Errors: none. Events: none.
register('ff_refuse_claims', function(keys, args)
  local c, held = Context.open(keys[1]), 0
  for i = 2, #args do
    if args[1] == '1' then
      workers.mark_draining(c, args[i])
    else
      server.call('ZREM', K.index(c.tag, 'draining'), args[i])
    end
    held = held + server.call('SCARD', K.worker_leases(c.tag, args[i]))
  end
  return reply.ok(held)
end, { 'allow-oom' })
