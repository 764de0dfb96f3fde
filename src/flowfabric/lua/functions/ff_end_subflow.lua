-- ff_end_subflow: end a member whose flow in another partition finished.
-- Keys: core, result, the indexes of the member, and those of what depends on it.
-- Arguments: execution_id, flow_id, state (completed | failed | cancelled | gone: it may get another
--   flow), reason, encoding of the result or empty, whether there is a result (1 | 0), result.
-- Replies: `done`, also if the member has ended or has another flow. Errors: none.
-- Events: completion.
reply.register_function('ff_end_subflow', function(c, id, args)
  local result = args[6] == '1' and args[7] or nil
  subflows.finish_parent(c, id, args[2], args[3], args[4], args[5], result)
  return reply.ok('done', cascade.told(c))
end, { 'allow-oom' })
