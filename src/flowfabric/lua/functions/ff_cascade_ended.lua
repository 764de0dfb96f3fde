-- ff_cascade_ended: resolve again what depends on an ended member; what is resolved stays as it is.
-- Keys: core, flow core, out, in, cascade_backlog, and those of the transitions that it makes.
-- Arguments: execution_id. Replies: resolved, promoted, skipped, cancelled, whether more is left
--   (1 | 0). Errors: execution_not_found, execution_not_terminal. Events: completion, flow_finished.
register('ff_cascade_ended', function(keys, args)
  local c, id = Context.open(keys[1], true), args[1]
  return reply.guarded(function()
    local rec = record.checked(c, id)
    if not rec then return reply.err('execution_not_found') end
    if not S.is_terminal(rec.state) then return reply.err('execution_not_terminal') end
    if rec.flow_id and rec.out then cascade.run(c, { { id = id, rec = rec, marked = true } }) end
    c:close()
    local done = cascade.counts(c)
    return reply.ok(done.resolved, done.promoted, done.skipped, done.cancelled, done.pending)
  end, c, id)
end, { 'allow-oom' })
