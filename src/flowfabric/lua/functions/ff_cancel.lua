-- ff_cancel: end an execution deliberately, from any phase that is not terminal.
-- Keys: core, every index of the current state, lane terminal, timers, grant.
-- Arguments: execution_id, reason, source, fence.
-- Replies: `cancelled`. Errors: execution_not_found, execution_not_active and, for lease
--   holders, those of the fence. Events: completion.
local UNFENCED = { operator_override = true, flow_cascade = true, system_timeout = true }

record.register_function('ff_cancel', record.checked_lease, function(c, id, rec, args)
  local reason, source, text = args[2], args[3], args[4]
  local unfenced = UNFENCED[source]
  local problem
  if S.is_terminal(rec.state) then
    if unfenced and S.is_cancelled(rec.state) then return reply.ok('cancelled') end
    problem = reply.not_active(rec)
  elseif not unfenced then
    problem = fence.check(c, id, rec, text, false, false)
  end
  if problem then
    local own = not unfenced and fence.own_attempt(c, id, rec, text)
    return own and own.state == 'ended_cancelled' and reply.ok('cancelled') or problem
  end
  ending.cancel(c, id, rec, source, reason)
  return reply.ok('cancelled', cascade.told(c))
end, { 'allow-oom' })
