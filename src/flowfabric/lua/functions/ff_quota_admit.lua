-- ff_quota_admit: admit runs of executions under a quota policy, and record it.
-- Keys (tag = quota partition): policy, window, guards, admitted_set.
-- Arguments: quota_policy_id, request id, slot ttl ms, then per execution: execution id, the number
--   of the run.
-- Replies: one word per execution (see `quota.admit`), jitter ms | `unlimited`.
-- Errors: quota_policy_not_found, batch_too_large. Events: none.
quota.register_function('ff_quota_admit', function(q, args)
  local excess = batch.excess(args, (#args - 3) / 2)
  if excess then return excess end
  if q.rate == 0 and q.cap == 0 then return reply.ok('unlimited') end
  local ids, runs = quota.runs(args, 4)
  return reply.ok(quota.admit(q, ids, runs, args[2], tonumber(args[3])), q.jitter)
end, { 'allow-oom' })
