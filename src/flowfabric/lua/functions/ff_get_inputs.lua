-- ff_get_inputs: what the satisfied named edges of an execution pass on.
-- Keys: core, flow in, core and result of the upstreams. Arguments: execution_id.
-- Replies: a list of [name, upstream, outcome, result, encoding], the upstream that decided.
-- Errors: execution_not_found.
record.register_function('ff_get_inputs', record.read, function(c, id, rec)
  if not rec.flow_id then return reply.ok({}, false) end
  return reply.ok(unpack(edges.inputs(c, id, rec)))
end, { 'no-writes' })
