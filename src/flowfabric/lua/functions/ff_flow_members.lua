-- ff_flow_members: a page of the members of a flow, with how far their joins are decided.
-- Keys: flow core, members, core. Arguments: flow_id, number of the last member of the page before,
--   limit.
-- Replies: a list of [number, execution_id, node key, state, kind, deps, join, subflow].
-- Errors: none. Events: none.
register('ff_flow_members', function(keys, args)
  local tag, rows = keys[1], {}
  if not flow.shown_since(tag, args[1]) then return reply.ok(rows) end
  local page = server.call('ZRANGE', K.members(tag, args[1]), '(' .. args[2], '+inf', 'BYSCORE',
    'LIMIT', 0, args[3], 'WITHSCORES')
  for i = 1, #page, 2 do
    local ok, found = try(server.call, 'HMGET', K.core(tag, page[i]), 'node', 'state',
      'execution_kind', 'deps', 'join', 'subflow')
    rows[#rows + 1] = { page[i + 1], page[i], unpack(ok and found or {}, 1, 6) }
  end
  return reply.ok(rows)
end, { 'no-writes' })
