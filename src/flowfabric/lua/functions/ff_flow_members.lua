-- ff_flow_members: a page of the members of a flow, with how far their joins are decided.
-- Keys: flow core, members, member_ids, core. Arguments: flow_id, where the page begins, limit. By
--   id: `-`, or `(` and the last member of the page before; in the order in which they joined: the
--   number of that member, or 0.
-- Replies: a list of [execution_id, number, node key, state, kind, deps, join, subflow]; whether there
--   are more (1 | 0).
-- Errors: none. Events: none.
local function ids_from(tag, flow_id, start, limit)
  if tonumber(start) then
    return server.call('ZRANGE', K.members(tag, flow_id), '(' .. start, '+inf', 'BYSCORE', 'LIMIT',
      0, limit)
  end
  return server.call('ZRANGE', K.member_ids(tag, flow_id), start, '+', 'BYLEX', 'LIMIT', 0, limit)
end

register('ff_flow_members', function(keys, args)
  local tag, limit, rows = keys[1], tonumber(args[3]), {}
  if not flow.shown_since(tag, args[1]) then return reply.ok(rows, 0) end
  local ids = ids_from(tag, args[1], args[2], limit + 1)
  local numbers = ids[1] and server.call('ZMSCORE', K.members(tag, args[1]), unpack(ids))
  for i = 1, math.min(limit, #ids) do
    local ok, found = try(server.call, 'HMGET', K.core(tag, ids[i]), 'node', 'state',
      'execution_kind', 'deps', 'join', 'subflow')
    rows[i] = { ids[i], numbers[i], unpack(ok and found or {}, 1, 6) }
  end
  return reply.ok(rows, #ids > limit and 1 or 0)
end, { 'no-writes' })
