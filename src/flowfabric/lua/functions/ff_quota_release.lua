-- ff_quota_release: free what runs of executions hold, or undo admissions that no run followed.
-- Keys (tag = quota partition): policy, window, guards, admitted_set, blocked.
-- Arguments: quota_policy_id, request id (empty unless its admissions are undone), then per
--   execution: execution id, the number of its latest run that is over or empty for all.
-- Replies: places freed, how many executions it admits now, and in how many ms if none (see
--   `quota.opening`; 0 and 0 if it freed no place).
-- Errors: quota_policy_not_found, batch_too_large. Events: none.
quota.register_function('ff_quota_release', function(q, args)
  local excess = batch.excess(args, (#args - 2) / 2)
  if excess then return excess end
  local ids, runs = quota.runs(args, 3, clock.END)
  local freed = args[2] == '' and quota.release(q, ids, runs) or quota.undo(q, ids, args[2])
  if freed == 0 then return reply.ok(0, 0, 0) end
  return reply.ok(freed, quota.opening(q))
end, { 'allow-oom' })
