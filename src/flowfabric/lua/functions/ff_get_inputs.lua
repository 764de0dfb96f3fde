-- ff_get_inputs: a page of what the satisfied named edges of an execution pass on.
-- Keys: core, flow in, core and result of the upstreams. Arguments: execution_id, where the page
--   begins (0: at the first).
-- Replies: a list of [name, upstream, outcome, result, encoding, whether the result was left out],
--   the upstream that decided if the page has it, where the next page begins (0: at the end).
-- Errors: execution_not_found.
record.register_function('ff_get_inputs', record.read, function(c, id, rec, args)
  if not rec.flow_id then return reply.ok({}, false, '0') end
  return reply.ok(edges.inputs_page(c, id, rec, args[2]))
end, { 'no-writes' })
