-- ff_trim: delete terminal executions whose retention is over, each with all its keys.
-- Keys: every key of the execution, lane terminal, all_executions, purge_backlog.
-- Arguments: lane, then execution ids.
-- Replies per id: purged | purging (ff_purge deletes the rest) | not_due (or a child needs
--   it) | not_terminal (or of
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
  if flow_purging.is_needed(c, id, rec) then return 'not_due' end
  if purging.delete(c, id, rec) then return 'purged' end
  return 'purging'
end, { 'allow-oom' })
