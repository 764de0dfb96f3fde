-- ff_quota_release: free the slots of executions, or undo admissions whose executions did not start.
-- Keys (tag = quota partition): policy, window, guards, admitted_set, blocked.
-- Arguments: quota_policy_id, request id (empty unless its admissions are undone), any number of
--   execution ids.
-- Replies: places freed, how many executions it admits now, and in how many ms if none (see
--   `quota.opening`; 0 and 0 if it freed no place).
-- Errors: quota_policy_not_found, batch_too_large. Events: none.
quota.register_function('ff_quota_release', function(q, args)
  local excess = batch.excess(args, #args - 2)
  if excess then return excess end
  local freed = quota.release(q, values.slice(args, 3, #args), args[2])
  if freed == 0 then return reply.ok(0, 0, 0) end
  return reply.ok(freed, quota.opening(q))
end, { 'allow-oom' })
