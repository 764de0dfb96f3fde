-- ff_promote_delayed: make due delayed executions eligible; the attempt state is kept.
-- Keys: core, lane delayed, lane eligible. Arguments: lane, then execution ids.
-- Replies per id: promoted | not_yet_due | not_found_cleaned | not_runnable_cleaned |
--   not_delayed_cleaned | cancelled (a member of a cancelled flow) | error:<why>. Errors: none.
-- Events: completion (a member of a cancelled flow); rings the doorbell.
batch.register_function('ff_promote_delayed', 2, function(c, id, args)
  local lane, rec = args[1], record.checked(c, id)
  if not rec or rec.lane_id ~= lane or not S.is_runnable(rec.state)
      or not S.is_delayed(rec.state) then
    c:zrem(K.lane(c.tag, lane, 'delayed'), id)
    if not rec then return 'not_found_cleaned' end
    return not S.is_runnable(rec.state) and 'not_runnable_cleaned' or 'not_delayed_cleaned'
  end
  if tonumber(rec.delay_until or 0) > c.now then return 'not_yet_due' end
  local f = flow.ending_member(c, rec, flow.resumes(c, rec))
  if f then
    ending.cancel(c, id, rec, 'flow_cascade', f.cancel_reason)
    return 'cancelled'
  end
  if subflows.is_node(rec) then
    record.clear(c, id, rec, 'delay_until')
    flow.move_on(c, id, rec)
    return 'promoted'
  end
  waiting.leave(c, id, rec)
  record.transition(c, id, rec, S.eligible(S.attempt(rec.state)), 'last_transition_at', c.now)
  record.clear(c, id, rec, 'delay_until', 'blocking_detail')
  waiting.enter(c, id, rec)
  waiting.ring(c, rec)
  return 'promoted'
end, { 'allow-oom' })
