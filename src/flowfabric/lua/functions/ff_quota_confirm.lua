-- ff_quota_confirm: keep the slots of claimed runs until they are released.
-- Keys (tag = quota partition): policy, guards, admitted_set.
-- Arguments: quota_policy_id, then per execution: execution id, the number of the run.
-- Replies: nothing. Errors: quota_policy_not_found, batch_too_large. Events: none.
quota.register_function('ff_quota_confirm', function(q, args)
  local excess = batch.excess(args, (#args - 1) / 2)
  if excess then return excess end
  quota.confirm(q, quota.runs(args, 2))
  return reply.ok()
end, { 'allow-oom' })
