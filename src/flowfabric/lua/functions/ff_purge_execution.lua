-- ff_purge_execution: delete a terminal execution with all its keys before its retention is over.
-- Keys: every key of the execution, lane terminal, all_executions, purge_backlog.
-- Arguments: execution_id. Replies: `purged`, also for an execution that does not exist: a repeat
--   finds none. Errors: execution_not_terminal, flow_not_terminal (a child has
--   not ended). Events: none.
reply.register_function('ff_purge_execution', function(c, id)
  local rec = record.read(c, id)
  if rec and not S.is_terminal(rec.state) then return reply.err('execution_not_terminal') end
  if rec and flow_purging.is_needed(c, id, rec) then
    return reply.err('flow_not_terminal', 'an execution that depends on it has not ended')
  end
  if rec then purging.delete(c, id, rec) end
  return reply.ok('purged')
end, { 'allow-oom' })
