-- ff_delete_flow: delete an ended flow with its members, or a submission that did not end; the first
-- call only hides it, the next ones delete a limited number of members each.
-- Keys: every key of the flow and its members, flow_index, flow_due, cancel_backlog,
--   release_backlog, replay_backlog, subflow_outbox, subflow_parked, cascade_failed, cascade_poison.
-- Arguments: flow_id, digest of the submission that is given up (empty: the flow has ended), whether
--   its parent was deleted (1: the flow follows by ff_audit_flow once it has ended | 0).
-- Replies: `deleting` (call again) | `deleted` | `kept` (the submission has ended after all, or the
--   flow follows its parent later).
-- Errors: flow_not_found, flow_not_terminal.
-- Events: flow_cancel_requested, completion (subflows that have not ended).
register('ff_delete_flow', function(keys, args)
  local c, flow_id, digest = Context.open(keys[1]), args[1], args[2]
  local f = flow.read(c, flow_id)
  if not f then return reply.err('flow_not_found') end
  if args[3] == '1' then
    subflows.orphan(c, flow_id)
    return reply.ok('kept')
  end
  if f.deleting then return reply.ok(flow_purging.step(c, flow_id) and 'deleted' or 'deleting') end
  if digest ~= '' then
    if f.digest ~= digest or not f.submitting then return reply.ok('kept') end
  elseif f.submitting then
    return reply.err('flow_not_found')
  else
    local problem = flow_purging.problem(f)
    if problem then return problem end
  end
  flow.set(c, flow_id, 'deleting', '1')
  flow.expect_deletion(c, flow_id, f)
  return reply.ok('deleting')
end, { 'allow-oom' })
