-- ff_wait_children: the lease holder parks until its open dependencies are resolved.
-- Keys: core, deps:unresolved, lane active / blocked:dependencies, lease_expiry, worker leases.
-- Arguments: execution_id, fence, source (an override: `operator_override <request id>`).
-- Replies: `moved` | `ready` (nothing to wait for: the lease is kept).
-- Errors: execution_not_found and those of the fence. Events: released, expired (a lapsed lease).
pausing.register_function('ff_wait_children', 'waiting_children', function(c, id, rec)
  if server.call('SCARD', K.unresolved(c.tag, id)) == 0 then return 'ready' end
  pausing.release(c, id, rec, S.waiting_children('i'), 'waiting_children:moved', {})
  return 'moved'
end, { 'allow-oom' })
