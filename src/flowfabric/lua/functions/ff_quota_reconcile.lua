-- ff_quota_reconcile: drop what expired of a quota policy, and correct slots that are as a scanner
-- read them: a concurrent admission is never lost.
-- Keys (tag = quota partition): policy, window, guards, admitted_set, blocked, quota_policies.
-- Arguments: quota_policy_id, then per slot: execution id, its end as read, the number of the run
--   that has it or empty if it is to be freed.
-- Replies: `reconciled`, slots freed, slots confirmed, slots before, slots after, expired entries
--   removed, how many executions it admits now, and in how many ms if none (see `quota.opening`) |
--   `removed` (no such policy).
-- Errors: none. Events: none.
local function reconcile(tag, args)
  local id = args[1]
  local q = quota.read(tag, id)
  if not q then
    server.call('UNLINK', K.quota_window(tag, id), K.quota_guards(tag, id), K.quota_slots(tag, id),
      K.quota_blocked(tag, id))
    server.call('ZREM', K.index(tag, 'quota_policies'), id)
    return reply.ok('removed')
  end
  local stored, freed, confirmed = server.call('ZCARD', q.slots), 0, 0
  for i = 2, #args, 3 do
    local member = args[i]
    if tonumber(server.call('ZSCORE', q.slots, member)) == tonumber(args[i + 1]) then
      if args[i + 2] ~= '' then
        server.call('ZADD', q.slots, values.text(quota.CLAIMED + tonumber(args[i + 2])), member)
        confirmed = confirmed + 1
      else
        freed = freed + quota.release(q, { member }, { clock.END })
      end
    end
  end
  local expired = quota.trim(q)
  local room, wait = 0, 0
  if freed > 0 then room, wait = quota.opening(q) end
  local held = server.call('ZCARD', q.slots)
  return reply.ok('reconciled', freed, confirmed, stored, held, expired, room, wait)
end

register('ff_quota_reconcile', function(keys, args)
  return quota.guarded(args[1], reconcile, keys[1], args)
end, { 'allow-oom' })
