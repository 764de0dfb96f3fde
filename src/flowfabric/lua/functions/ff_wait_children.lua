-- ff_wait_children: the lease holder parks until its open dependencies are resolved.
-- Keys: core, deps:unresolved, lane active / blocked:dependencies, lease_expiry, worker leases.
-- Arguments: execution_id, fence, source (an override: `operator_override <request id>`).
-- Replies: `moved` | `ready` (nothing to wait for: the lease is kept).
-- Errors: execution_not_found and those of the fence. Events: released, expired (a lapsed lease).
reply.register_function('ff_wait_children', function(keys, args)
  local c = Context.open(keys[1])
  local id, text, source = args[1], args[2], args[3]
  local rec = record.checked_lease(c, id)
  if not rec then return reply.err('execution_not_found') end
  local request = operator.request(source)
  local answer = request and operator.answered(rec, request)
  if answer then return reply.ok(answer) end
  local problem = fence.check(c, id, rec, text, request, true)
  if problem then
    local before = pausing.replayed(c, id, rec, text, 'waiting_children')
    return before and reply.ok(before) or problem
  end
  if server.call('SCARD', K.unresolved(c.tag, id)) == 0 then return reply.ok('ready') end
  pausing.release(c, id, rec, S.waiting_children('i'), 'waiting_children:moved', {})
  if request then operator.remember(c, id, rec, request, 'moved') end
  return reply.ok('moved')
end, { 'allow-oom' })
