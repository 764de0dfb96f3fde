-- ff_refuse_claims: give no more work of some namespaces to a worker process, or give it again.
-- Keys: draining, worker leases, core. Arguments: 1 to refuse | 0 to give again, instance, namespaces
--   (separated by spaces; `*` stands for all).
-- Replies: number of leases of these namespaces that it holds here. Errors: none. Events: none.
register('ff_refuse_claims', function(keys, args)
  local c = Context.open(keys[1])
  workers.mark(c, args[2], args[3], args[1] == '1')
  return reply.ok(workers.held(c, args[2], args[3]))
end, { 'allow-oom' })
