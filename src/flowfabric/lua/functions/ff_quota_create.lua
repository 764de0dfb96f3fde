-- ff_quota_create: store a quota policy; an existing one keeps its limits.
-- Keys (tag = quota partition): policy, quota_policies, events.
-- Arguments: quota_policy_id, request id, window seconds, max requests per window, max concurrent,
--   jitter ms, name or empty.
-- Replies: `created` | ALREADY_SATISFIED with 1 if its limits differ, otherwise 0.
-- Errors: none. Events: quota_created.
local function create(tag, id, request, limits, label)
  -- First, so that a repeat restores a lost entry.
  server.call('ZADD', K.index(tag, 'quota_policies'), 0, id)
  local now = clock.now()
  local q, fields = quota.read(tag, id, now), {}
  for i, name in ipairs(quota.FIELDS) do values.append(fields, { name, limits[i] }) end
  if not q then
    values.add(fields, 'name', label)
    server.call('HSET', K.quota(tag, id), 'created_at', now, 'request', request, unpack(fields))
    events.emit_operator(tag, now, 'quota_created', 'q', id, unpack(fields))
  elseif q.stored.request ~= request then
    local differs = 0
    for i, limit in ipairs(limits) do
      if q.limits[i] ~= tonumber(limit) then differs = 1 end
    end
    return reply.already(differs)
  end
  return reply.ok('created')
end

register('ff_quota_create', function(keys, args)
  local limits = { args[3], args[4], args[5], args[6] }
  return quota.guarded(args[1], create, keys[1], args[1], args[2], limits, args[7])
end, {})
