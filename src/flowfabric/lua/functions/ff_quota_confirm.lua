-- ff_quota_confirm: keep the slots of claimed executions until they are released.
-- Keys (tag = quota partition): policy, admitted_set.
-- Arguments: quota_policy_id, any number of execution ids. Replies: nothing.
-- Errors: quota_policy_not_found, batch_too_large. Events: none.
quota.register_function('ff_quota_confirm', function(q, args)
  local excess = batch.excess(args, #args - 1)
  if excess then return excess end
  local slots, claimed = {}, values.text(quota.CLAIMED + q.now)
  if q.cap > 0 then
    -- Running work counts, even above the cap.
    for i = 2, #args do values.append(slots, { claimed, args[i] }) end
  end
  values.call('ZADD', q.slots, slots)
  return reply.ok()
end, { 'allow-oom' })
