-- ff_quota_admit: admit executions under a quota policy, and record it.
-- Keys (tag = quota partition): policy, window, guards, admitted_set.
-- Arguments: quota_policy_id, request id, slot ttl ms, any number of execution ids.
-- Replies: one word per execution (see `quota.admit`), jitter ms | `unlimited`.
-- Errors: quota_policy_not_found, batch_too_large. Events: none.
quota.register_function('ff_quota_admit', function(q, args)
  local excess = batch.excess(args, #args - 3)
  if excess then return excess end
  if q.rate == 0 and q.cap == 0 then return reply.ok('unlimited') end
  return reply.ok(quota.admit(q, values.slice(args, 4, #args), args[2], tonumber(args[3])), q.jitter)
end, { 'allow-oom' })
