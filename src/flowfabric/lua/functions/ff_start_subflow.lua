-- ff_start_subflow: let a flow run, or run again, that belongs to a member of another partition.
-- Keys: flow core, held, release_backlog, replay_backlog, and the indexes of its members.
-- Arguments: flow_id, which members run again (a: those that did not succeed | w: all |
--   n: all, and the flow is no longer cancelled) or empty.
-- Replies: `started` (ff_drain_cascade replays the members) | `gone` (there is no flow that could
--   run). Errors: none. Events: none; rings the doorbell.
register('ff_start_subflow', function(keys, args)
  local c, flow_id, which = Context.open(keys[1], true), args[1], args[2]
  local runs
  if which ~= '' then
    runs = subflows.rerun(c, flow_id, which)
  else
    subflows.begin(c, flow_id)
    runs = flow.read(c, flow_id) ~= nil
  end
  c:close()
  return reply.ok(runs and 'started' or 'gone', cascade.told(c))
end, { 'allow-oom' })
