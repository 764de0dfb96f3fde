-- ff_replay_flow: run the failed members of a flow again, and reopen what was skipped after them; what
-- one call does not reach follows by ff_drain_cascade.
-- Keys: flow core, members, replay_backlog, reopen_backlog, and those of ff_replay for each member.
-- Arguments: flow_id, which members (failed: failed and expired ones | all: cancelled ones, too),
--   request id (a repeated request gets the same answer and has no second effect).
-- Replies: members replayed, members reopened, whether more follow (1 | 0).
-- Errors: flow_not_found, flow_already_terminal (max_replays_exhausted, deps_not_satisfied,
--   execution_not_terminal: the member stays as it is).
-- Events: replayed, completion (members that an edge ends).
register('ff_replay_flow', function(keys, args)
  local c, flow_id, which, request = Context.open(keys[1], true), args[1], args[2] == 'all' and 'a' or 'f', args[3]
  return reply.guarded(function()
    local f = flow.live(c, flow_id)
    if f.replayed and string.sub(f.replayed, 1, #request) == request then
      local done, reopened, more = string.match(f.replayed, ' (%d+) (%d+) (%d)$')
      return reply.ok(tonumber(done), tonumber(reopened), tonumber(more))
    end
    local done, reopened, left = replaying.flow(c, flow_id, '0', which)
    local more = (left or cascade.counts(c).pending > 0) and 1 or 0
    flow.set(c, flow_id, 'replayed', table.concat({ request, done, reopened, more }, ' '))
    c:close()
    return reply.ok(done, reopened, more)
  end, c, flow_id)
end, {})
