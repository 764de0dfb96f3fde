-- ff_flow_members: a page of the members of a flow, with how far their joins are decided.
-- Keys: flow core, members, core. Arguments: flow_id, where the page begins (`-`: at the first
--   member), limit.
-- Replies: a list of [execution_id, number, node key, state, kind, deps, join, subflow]; whether there
--   are more (1 | 0).
-- Errors: none. Events: none.
register('ff_flow_members', function(keys, args)
  local tag, limit, rows = keys[1], tonumber(args[3]), {}
  if not flow.shown_since(tag, args[1]) then return reply.ok(rows, 0) end
  local page = server.call('ZRANGE', K.members(tag, args[1]), args[2], '+', 'BYLEX', 'LIMIT', 0,
    limit + 1)
  for i = 1, math.min(limit, #page) do
    local ok, found = try(server.call, 'HMGET', K.core(tag, page[i]), 'number', 'node', 'state',
      'execution_kind', 'deps', 'join', 'subflow')
    rows[i] = { page[i], unpack(ok and found or {}, 1, 7) }
  end
  return reply.ok(rows, #page > limit and 1 or 0)
end, { 'no-writes' })
