-- ff_block: block executions that could be claimed now.
-- Keys: core, lane eligible, lane blocked:*.
-- Arguments: request id or empty (a repeated request gets the same answer), then per execution:
--   execution_id, lane or empty, reason, detail or empty, when the cause is expected to end (`+ms`:
--   from now on) or empty.
-- Replies per execution: `blocked` | [0, code, detail...].
-- Errors: execution_not_found, execution_not_active (it has ended), execution_not_eligible,
--   invalid_blocking_reason, invalid_input (lane_mismatch); of the whole call: batch_too_large.
-- Events: operator_blocked.
local ITEM = 5

local function block(c, id, request, lane, ...)
  local rec = record.checked(c, id)
  if not rec then return reply.err('execution_not_found') end
  if request ~= '' and operator.answered(rec, request) then return 'blocked' end
  local problem = granting.lane_problem(rec, lane) or admission.block(c, id, rec, ...)
  if problem then return problem end
  if request ~= '' then operator.remember(c, id, rec, request, 'blocked') end
  return 'blocked'
end

register('ff_block', function(keys, args)
  local count = (#args - 1) / ITEM
  local problem = batch.excess(args, count)
  if problem then return problem end
  local c, replies = Context.open(keys[1], count > 1), {}
  for i = 2, #args, ITEM do
    replies[#replies + 1] = reply.guarded(block, c, args[i], args[1], args[i + 1], args[i + 2],
      args[i + 3], args[i + 4])
  end
  c:close()
  return reply.ok(replies)
end, { 'allow-oom' })
