-- ff_read_steps: a page of the step records of an execution, in the order in which they were made.
-- Keys: core, steps. Arguments: execution_id, after which seq, limit.
-- Replies: records by position (seq, step_key, kind, status, codec, result, reason, category,
--   attempt_index, lease_epoch, started_at, finished_at, fire_at, child), the seq to continue after or
--   nothing. Errors: execution_not_found, corruption.
local PAGE_BYTES = 1048576

record.register_function('ff_read_steps', record.read, function(c, id, _, args)
  local rows, following = steps.page(c, id, tonumber(args[2]), tonumber(args[3]), PAGE_BYTES)
  return reply.ok(rows, following)
end, { 'no-writes' })
