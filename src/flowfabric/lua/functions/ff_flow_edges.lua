-- ff_flow_edges: a page of the edges of a flow, by the numbers of their upstreams and their own.
-- Keys: flow core, members, out, in. Arguments: flow_id, upstream id (empty: all members), number of
--   the member to begin with, number of the last edge of the page before, limit.
-- Replies: when the flow was created, or 0; a list of [edge_id, child uuid, line]; the next member
--   and the last edge taken, both empty at the end.
-- Errors: none. Events: none.

-- How many members without edges one call passes over.
local MEMBERS = 200

-- Adds edges that leave a member; the number of the last one if there may be more, or nil.
local function add(tag, flow_id, id, after, limit, rows)
  local page = server.call('ZRANGE', K.out(tag, flow_id, id), '(' .. after, '+inf', 'BYSCORE',
    'LIMIT', 0, limit, 'WITHSCORES')
  for i = 1, #page, 2 do
    local edge_id, child = string.sub(page[i], 1, 36), string.sub(page[i], 38)
    local line = server.call('HGET', K.into(tag, flow_id, tag .. ':' .. child), edge_id)
    -- The edges of a deleted child are gone.
    if line then rows[#rows + 1] = { edge_id, child, line } end
  end
  return #page == 2 * limit and page[#page] or nil
end

register('ff_flow_edges', function(keys, args)
  local tag, flow_id, after, limit = keys[1], args[1], args[4], tonumber(args[5])
  local created, rows = flow.shown_since(tag, flow_id), {}
  if not created then return reply.ok('0', rows, '', '') end
  if args[2] ~= '' then
    local last = add(tag, flow_id, args[2], after, limit, rows)
    return reply.ok(created, rows, last and '0' or '', last or '')
  end
  local page = server.call('ZRANGE', K.members(tag, flow_id), args[3], '+inf', 'BYSCORE', 'LIMIT', 0,
    MEMBERS, 'WITHSCORES')
  for i = 1, #page, 2 do
    if #rows >= limit then return reply.ok(created, rows, page[i + 1], '0') end
    local last = add(tag, flow_id, page[i], after, limit - #rows, rows)
    if last then return reply.ok(created, rows, page[i + 1], last) end
    after = '0'
  end
  if #page < 2 * MEMBERS then return reply.ok(created, rows, '', '') end
  return reply.ok(created, rows, values.text(page[#page] + 1), '0')
end, { 'no-writes' })
