-- ff_flow_edges: a page of the edges of a flow, by the ids of their upstreams and their own numbers.
-- Keys: flow core, member_ids, out, in. Arguments: flow_id, upstream id (empty: all members), where the
--   members begin (as ZRANGE takes it), number of the last edge of the first of them that was taken
--   (0: none), limit.
-- Replies: when the flow was created, or 0; a list of [child uuid, line, upstream id, number]; the
--   last upstream looked at, and its last edge (empty: it has no more), both empty at the end.
-- Errors: none. Events: none.

-- How many members without edges one call passes over.
local MEMBERS = 200

-- Adds edges that leave a member; the number of the last one if there may be more, or nil.
local function add(tag, flow_id, id, after, limit, rows)
  local page = server.call('ZRANGE', K.out(tag, flow_id, id), '(' .. after, '+inf', 'BYSCORE',
    'LIMIT', 0, limit, 'WITHSCORES')
  for i = 1, #page, 2 do
    local child, place = string.sub(page[i], 1, 36), string.sub(page[i], 38)
    local line = server.call('HGET', K.into(tag, flow_id, tag .. ':' .. child), place)
    local upstream = line and string.match(line, '^%l%l %d+ (%S+)')
    -- The edges of a deleted child are gone, even if another one got its id.
    if line and (not upstream or upstream == edges.uuid_of(id)) then
      rows[#rows + 1] = { child, line, id, page[i + 1] }
    end
  end
  return #page == 2 * limit and page[#page] or nil
end

register('ff_flow_edges', function(keys, args)
  local tag, flow_id, after, limit = keys[1], args[1], args[4], tonumber(args[5])
  local created, rows = flow.shown_since(tag, flow_id), {}
  if not created then return reply.ok('0', rows, '', '') end
  local members = args[2] ~= '' and { args[2] } or server.call('ZRANGE', K.member_ids(tag, flow_id),
    args[3], '+', 'BYLEX', 'LIMIT', 0, MEMBERS)
  for i, id in ipairs(members) do
    if #rows >= limit then return reply.ok(created, rows, members[i - 1], '') end
    local last = add(tag, flow_id, id, after, limit - #rows, rows)
    if last then return reply.ok(created, rows, id, last) end
    after = '0'
  end
  if #members < MEMBERS then return reply.ok(created, rows, '', '') end
  return reply.ok(created, rows, members[MEMBERS], '')
end, { 'no-writes' })
