-- ff_quota_update: change limits of a quota policy; its window and its slots stay.
-- Keys (tag = quota partition): policy, window, admitted_set, blocked, events.
-- Arguments: quota_policy_id, then per limit: name, value.
-- Replies: how many executions it admits now, and in how many ms if none (see `quota.opening`).
-- Errors: quota_policy_not_found. Events: quota_updated.
quota.register_function('ff_quota_update', function(q, args)
  local changed = {}
  for i = 2, #args, 2 do
    if tonumber(q.stored[args[i]] or 0) ~= tonumber(args[i + 1]) then
      values.append(changed, { args[i], args[i + 1] })
    end
  end
  if #changed > 0 then
    server.call('HSET', K.quota(q.tag, q.id), unpack(changed))
    events.emit_operator(q.tag, q.now, 'quota_updated', 'q', q.id, unpack(changed))
    q = quota.read(q.tag, q.id, q.now)
  end
  return reply.ok(quota.opening(q))
end, { 'allow-oom' })
