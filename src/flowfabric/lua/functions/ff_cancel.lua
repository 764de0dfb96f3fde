-- ff_cancel: end an execution deliberately, from any phase that is not terminal.
-- Keys: core, every index of the current state, lane terminal, timers, grant.
-- Arguments: execution_id, reason, source, fence.
-- Replies: `cancelled`. Errors: execution_not_found, execution_not_active and, for lease
--   holders, those of the fence. Events: completion.
local UNFENCED = { operator_override = true, flow_cascade = true, system_timeout = true }

reply.register_function('ff_cancel', function(keys, args)
  local c = Context.open(keys[1])
  local id, reason, source, text = args[1], args[2], args[3], args[4]
  local rec = record.checked_lease(c, id)
  if not rec then return reply.err('execution_not_found') end
  local unfenced = UNFENCED[source]
  local ended = S.is_terminal(rec.state)
  if ended and unfenced then
    if S.is_cancelled(rec.state) then return reply.ok('cancelled') end
    return reply.not_active(rec)
  end
  if not unfenced then
    local problem = ended and reply.not_active(rec) or fence.check(c, id, rec, text, false, false)
    if problem then
      local own = fence.own_attempt(c, id, rec, text)
      if own and own.state == 'ended_cancelled' then return reply.ok('cancelled') end
      return problem
    end
  end
  local fields = {}
  record.tell(c, id, rec, fields, 'cancelled_by', source)
  record.tell(c, id, rec, fields, 'cancellation_reason', reason)
  ending.finish(c, id, rec, {
    outcome = 'c', reason = 'cancelled', source = source ~= '' and source or nil, close_reason = 'cancelled',
    stream_reason = 'attempt_cancelled', fields = fields,
  })
  return reply.ok('cancelled')
end, { 'allow-oom' })
