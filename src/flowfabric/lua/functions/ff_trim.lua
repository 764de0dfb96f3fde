-- ff_trim: delete terminal executions whose retention is over, each with all its keys.
-- Keys: every key of the execution, lane terminal, all_executions, purge_backlog.
-- Arguments: lane, then execution ids.
-- Replies per id: purged | purging (ff_purge deletes the rest) | not_due | not_terminal (or of
--   another lane) | orphan_removed | error:<why>. Errors: none. Events: none.
batch.register_function('ff_trim', 2, function(c, id, args)
  local lane, rec = args[1], record.read(c, id)
  local index = K.lane(c.tag, lane, 'terminal')
  if not rec or not S.is_terminal(rec.state) or rec.lane_id ~= lane then
    server.call('ZREM', index, id)
    return rec and 'not_terminal' or 'orphan_removed'
  end
  -- The record decides: a damaged index must not delete anything early.
  if ending.purge_due(id, rec) > c.now then return 'not_due' end
  server.call('DEL', K.core(c.tag, id), K.policy(c.tag, id), K.payload(c.tag, id),
    K.result(c.tag, id), K.tags(c.tag, id), K.history(c.tag, id), K.grant(c.tag, id),
    K.steps(c.tag, id), K.suspension(c.tag, id),
    K.marks(c.tag, id), K.satisfiers(c.tag, id), K.met(c.tag, id),
    K.pending_waitpoints(c.tag, id), K.suspend_dedup(c.tag, id))
  server.call('ZREM', index, id)
  server.call('ZREM', K.index(c.tag, 'all_executions'), id)
  local output = (rec.streamed or rec.tailed) and 's' or ''
  local left = purging.step(c, id, record.attempt_count(rec) .. output)
  if not left then return 'purged' end
  server.call('HSET', K.index(c.tag, 'purge_backlog'), id, left)
  return 'purging'
end, { 'allow-oom' })
