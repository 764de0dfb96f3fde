-- ff_resume: an operator or automation ends a pause whatever its condition says.
-- Keys: core, suspension, its waitpoints, lane suspended / eligible / delayed, suspension_timeout.
-- Arguments: execution_id, trigger, resume delay ms.
-- Replies: public_state. Errors: execution_not_found, execution_not_suspended. Events: resumed.
reply.register_function('ff_resume', function(keys, args)
  local c = Context.open(keys[1])
  -- What is recorded says why the attempt goes on: signal, operator, timeout (05 ★13).
  local id, trigger = args[1], args[2] == 'auto_resume' and 'timeout' or args[2]
  local rec = record.checked(c, id)
  if not rec then return reply.err('execution_not_found') end
  local open = S.is_suspended(rec.state) and suspension.open(c, id)
  if not open or not rec.current_waitpoint_id then return reply.err('execution_not_suspended') end
  suspension.resume(c, id, rec, open, {
    reason = 'resumed', delay_ms = tonumber(args[3]), trigger = trigger,
  })
  events.emit(c, 'resumed', id, rec, 'su', open.suspension_id, 'tr', trigger, 'cr', 'resumed')
  return reply.ok(S.public(rec.state))
end, { 'allow-oom' })
