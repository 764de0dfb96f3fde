-- ff_ask_parent: tell whether a member may own a flow of another partition, and let it own the flow.
-- Keys: core, flow core. Arguments: execution_id, flow_id, namespace of the flow, tag of the flow or
--   empty (only ask).
-- Replies: `run` | `wait` (its own dependencies are not met), depth of the flow.
-- Errors: execution_not_found, invalid_input, flow_already_terminal, terminal,
--   flow_submission_conflict. Events: none.
reply.register_function('ff_ask_parent', function(c, id, args)
  local rec, depth = subflows.parent(c, id, args[2], args[3])
  if args[4] ~= '' then subflows.attach(c, id, rec, args[2], args[4]) end
  return reply.ok(rec.subflow_open and 'run' or 'wait', depth)
end, { 'allow-oom' })
