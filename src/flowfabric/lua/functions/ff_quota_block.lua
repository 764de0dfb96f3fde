-- ff_quota_block: note executions that wait for a quota policy.
-- Keys (tag = quota partition): policy, blocked.
-- Arguments: quota_policy_id, then per execution: execution_id, its place among those that wait
--   (the lowest is let go first) or empty for the time.
-- Replies: nothing.
-- Errors: quota_policy_not_found, batch_too_large. Events: none.
quota.register_function('ff_quota_block', function(q, args)
  local excess = batch.excess(args, (#args - 1) / 2)
  if excess then return excess end
  for i = 2, #args, 2 do
    local place = args[i + 1] ~= '' and args[i + 1] or values.text(q.now)
    server.call('ZADD', K.quota_blocked(q.tag, q.id), 'NX', place, args[i])
  end
  return reply.ok()
end, { 'allow-oom' })
