-- ff_cancel_flow: cancel a flow and, as the policy says, its members; those that the call does not
-- reach follow by ff_drain_flow_cancel. A stronger policy later adds what it reaches.
-- Keys: flow core, members, cancel_backlog, and those of ff_cancel for each member.
-- Arguments: flow_id, policy, reason, grace ms.
-- Replies: `cancelled` | `already_cancelled`, stored policy, stored reason, number of members,
--   members left to cancel. Errors: flow_not_found.
-- Events: flow_cancel_requested, completion (each member), flow_finished.
register('ff_cancel_flow', function(keys, args)
  local c, flow_id, policy = Context.open(keys[1], true), args[1], args[2]
  local reason = args[3] ~= '' and args[3] or 'flow_cancelled'
  local f = flow.read(c, flow_id)
  if not f or not flow.is_shown(f) then return reply.err('flow_not_found') end
  local before = f.cancellation_policy
  if flow.is_cancelled(f) and flow_cancel.strength(policy) <= flow_cancel.strength(before) then
    local owing = server.call('ZSCORE', K.index(c.tag, 'cancel_backlog'), flow_id)
    return reply.ok('already_cancelled', before or policy, f.cancel_reason or '', f.node_count,
      owing and flow_cancel.owed(f) or 0)
  end
  local left = flow_cancel.flip(c, flow_id, policy, reason, tonumber(args[4]))
  c:close()
  return reply.ok('cancelled', policy, reason, f.node_count, left, cascade.told(c))
end, { 'allow-oom' })
