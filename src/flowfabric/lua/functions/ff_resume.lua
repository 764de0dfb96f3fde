-- ff_resume: an operator or automation ends a suspension, whatever its condition.
-- Keys: core, suspension, its waitpoints, lane suspended / eligible / delayed, suspension_timeout.
-- Arguments: execution_id, trigger, resume delay ms.
-- Replies: public_state. Errors: execution_not_found, execution_not_suspended.
-- Events: resumed, completion (a member of a cancelled flow).
record.register_function('ff_resume', record.checked, function(c, id, rec, args)
  -- Stored is why the attempt resumes: signal, operator, timeout (05 ★13).
  local trigger = args[2] == 'auto_resume' and 'timeout' or args[2]
  local open = S.is_suspended(rec.state) and suspension.open(c, id)
  if not open or not rec.current_waitpoint_id then return reply.err('execution_not_suspended') end
  suspension.resume(c, id, rec, open, {
    reason = 'resumed', delay_ms = tonumber(args[3]), trigger = trigger,
  })
  events.emit(c, 'resumed', id, rec, 'su', open.suspension_id, 'tr', trigger, 'cr', 'resumed')
  return reply.ok(S.public(rec.state))
end, { 'allow-oom' })
