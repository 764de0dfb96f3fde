-- ff_delete_flow: delete an ended flow with its members, or a submission that did not end; the first
-- call only hides it, the next ones delete a limited number of members each.
-- Keys: every key of the flow and its members, flow_index, cancel_backlog, release_backlog,
--   replay_backlog, cascade_poison.
-- Arguments: flow_id, digest of the submission that is given up (empty: the flow has ended).
-- Replies: `deleting` (call again) | `deleted` | `kept` (the submission has ended after all).
-- Errors: flow_not_found, flow_not_terminal. Events: none.
register('ff_delete_flow', function(keys, args)
  local c, flow_id, digest = Context.open(keys[1]), args[1], args[2]
  local f = flow.read(c, flow_id)
  if not f then return reply.err('flow_not_found') end
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
  return reply.ok('deleting')
end, { 'allow-oom' })
