-- ff_replay: run a terminal execution again under the same id.
-- Keys: core, policy, result, attempt, steps, waitpoints, lane terminal, lane eligible,
--   execution_deadline; of a member: flow core, in, out, reopen_backlog.
-- Arguments: execution_id, reason, requested_by, expected replay count or empty, keep steps (0 | 1),
--   request id (a repeated request gets the same answer and has no second effect), strict (0 | 1),
--   reopen downstream (0: no | 1: skipped members | 2: all terminal members).
-- Replies: public_state, members reopened. Errors: execution_not_found, execution_not_terminal,
--   max_replays_exhausted, flow_already_terminal, deps_not_satisfied, replay_not_allowed, corruption.
-- Events: replayed, completion (members that an edge ends).
record.register_function('ff_replay', record.checked, function(c, id, rec, args)
  -- First, because the new run may have ended before the repeat arrives.
  local answer = operator.answered(rec, args[6])
  if answer then
    local state, count = string.match(answer, '^(%S+) (%d+)$')
    return reply.ok(state, tonumber(count))
  end
  reply.stop_with(replaying.problem(c, id, rec, args[7] == '1'))
  if args[4] ~= '' and tonumber(args[4]) ~= tonumber(rec.replay_count or 0) then
    return reply.err('replay_not_allowed', rec.replay_count or '0')
  end
  local how = { reason = args[2], requested_by = args[3], keeps_steps = args[5] == '1' }
  replaying.run_again(c, id, rec, how)
  local reopened = 0
  if args[8] ~= '0' and rec.out then
    reopened = replaying.reopen(c, { { id = id, rec = rec } }, args[8] == '2')
  end
  operator.remember(c, id, rec, args[6], S.public(rec.state) .. ' ' .. values.text(reopened))
  return reply.ok(S.public(rec.state), reopened, cascade.told(c))
end, {})
