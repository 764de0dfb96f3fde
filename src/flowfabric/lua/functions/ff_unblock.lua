-- ff_unblock: unblock executions; admission decides again when they are claimed.
-- Keys: core, flow core, lane blocked:*, lane eligible.
-- Arguments: request id or empty (a repeated request gets the same answer), the reason that they
--   must be blocked for or empty, then execution ids.
-- Replies per execution: `waiting` | `closed` (waiting too, but its lane gives out nothing now; only
--   without a request id) | `cancelled` (a member of a cancelled flow) | [0, code, detail...]; then
--   what the call did for other members.
-- Errors: execution_not_found, execution_not_eligible; of the whole call: batch_too_large.
-- Events: operator_unblocked, completion (a member of a cancelled flow); rings the doorbell.
local function unblock(c, id, request, expected)
  local rec = record.checked(c, id)
  if not rec then return reply.err('execution_not_found') end
  local before = request ~= '' and operator.answered(rec, request)
  if before then return before end
  local problem, state = admission.unblock(c, id, rec, expected)
  if problem then return problem end
  if request == '' then return state == 'waiting' and c:is_closed(rec.lane_id) and 'closed' or state end
  operator.remember(c, id, rec, request, state)
  return state
end

register('ff_unblock', function(keys, args)
  local problem = batch.excess(args, #args - 2)
  if problem then return problem end
  local c, replies = Context.open(keys[1], #args > 3), {}
  for i = 3, #args do
    replies[#replies + 1] = reply.guarded(unblock, c, args[i], args[1], args[2])
  end
  c:close()
  return reply.ok(replies, cascade.told(c))
end, { 'allow-oom' })
