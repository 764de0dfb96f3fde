-- Growing a flow: members and the edges between them.

local MAX_WALK = 10000
local EMPTY_LIST = '\144'

-- What edges need to know about an upstream; read once per call.
local function upstream(c, id)
  c.upstreams = c.upstreams or {}
  local known = c.upstreams[id]
  if known == nil then
    local found = server.call('HMGET', K.core(c.tag, id), 'flow_id', 'state', 'rank', 'out')
    known = found[2] and { flow_id = found[1], state = found[2], rank = tonumber(found[3] or 0),
      out = found[4] }
    c.upstreams[id] = known
  end
  return known or nil
end

local function set_rank(c, id, rank)
  upstream(c, id).rank = rank
  server.call('HSET', K.core(c.tag, id), 'rank', values.text(rank))
end

-- The counters of the flow are written once per call, by `settle`.
local function grow(c, flow_id, f, name)
  f[name] = f[name] + 1
  f.graph_revision = f.graph_revision + 1
  c.grown = c.grown or {}
  c.grown[flow_id] = true
end

-- Makes an execution a member; its record already has the flow's id.
function graph.add_member(c, flow_id, f, id, rec)
  grow(c, flow_id, f, 'node_count')
  c:zadd(K.members(c.tag, flow_id), f.node_count, id)
  c:zadd(K.member_ids(c.tag, flow_id), '0', id)
  if f.parent_execution_id and not rec.out then
    server.call('ZADD', K.exits(c.tag, flow_id), f.node_count, id)
  end
  flow.count(c, flow_id, nil, rec.state)
  c.upstreams = c.upstreams or {}
  c.upstreams[id] = { flow_id = flow_id, rank = tonumber(rec.rank or 0), out = rec.out,
    state = rec.state }
end

-- Removes a member, with its edges, from the lists of its flow.
function graph.remove_member(c, flow_id, id)
  server.call('ZREM', K.members(c.tag, flow_id), id)
  server.call('ZREM', K.member_ids(c.tag, flow_id), id)
  server.call('UNLINK', K.into(c.tag, flow_id, id), K.out(c.tag, flow_id, id))
end

-- The first error among edges into a new child, by the check order of staging; nil if none. An edge
-- is { edge_id, upstream uuid, kind letter, input name, reference }.
function graph.edges_problem(c, flow_id, list)
  local seen, inputs = {}, {}
  for _, each in ipairs(list) do
    local edge_id, up_id, input = each[1], edges.id_of(c, each[2]), each[4]
    if seen[edge_id] or server.call('HEXISTS', K.edges(c.tag, flow_id), edge_id) == 1 then
      return reply.err('dependency_already_exists', edge_id)
    end
    seen[edge_id] = true
    if input ~= '' and inputs[input] then
      return reply.err('invalid_input', 'input_name: ' .. input .. ' is used twice')
    end
    inputs[input] = true
    local up = upstream(c, up_id)
    if not up or up.flow_id ~= flow_id then return reply.err('execution_not_in_flow', up_id) end
  end
end

-- The error if a child has an input of one of these names already, or nil. `names`: name, true.
function graph.input_problem(c, flow_id, id, names)
  for _, line in ipairs(server.call('HVALS', K.into(c.tag, flow_id, id))) do
    local name = edges.input_name(line)
    if names[name] then
      return reply.err('invalid_input', 'input_name: ' .. name .. ' is used twice')
    end
  end
end

-- The rank of a child with these edges: every upstream has a lower one. It is at least `floor`.
function graph.rank(c, list, floor)
  local rank = floor or 0
  for _, each in ipairs(list) do
    rank = math.max(rank, upstream(c, edges.id_of(c, each[2])).rank + 1)
  end
  return rank
end

-- The place of the next edge into a child.
local function next_place(c, flow_id, id)
  c.inbound = c.inbound or {}
  local place = (c.inbound[id] or server.call('HLEN', K.into(c.tag, flow_id, id))) + 1
  c.inbound[id] = place
  return place
end

-- Returns the edge, its upstream and its place.
function graph.add_edge(c, flow_id, f, id, each, state)
  local edge_id, up_uuid, kind, input, ref = each[1], each[2], each[3], each[4], each[5]
  local up_id, place = edges.id_of(c, up_uuid), next_place(c, flow_id, id)
  local up = upstream(c, up_id)
  grow(c, flow_id, f, 'edge_count')
  local e = { state = state, kind = kind, number = f.edge_count, upstream = up_uuid, id = edge_id,
    made = values.text(math.max(0, c.now - tonumber(f.created_at))), run = '', resolved = '',
    input = input, ref = ref }
  server.call('HSET', K.into(c.tag, flow_id, id), place, edges.format(e))
  c.new_edges = c.new_edges or {}
  local new, note = c.new_edges[flow_id] or {}, edges.note(id, place)
  new[#new + 1], new[#new + 2] = edge_id, note
  c.new_edges[flow_id] = new
  server.call('ZADD', K.out(c.tag, flow_id, up_id), f.edge_count, note)
  if not up.out then
    up.out = '1'
    if f.parent_execution_id then server.call('ZREM', K.exits(c.tag, flow_id), up_id) end
    server.call('HSET', K.core(c.tag, up_id), 'out', '1')
  end
  return e, up, place
end

-- Resolves an applied edge whose upstream has already ended; returns the answer, or nil.
function graph.resolve_ended(c, flow_id, place, id, up_uuid)
  local up_id = edges.id_of(c, up_uuid)
  local up = record.read(c, up_id)
  if not up or not S.is_terminal(up.state) then return nil end
  local answer = cascade.resolve(c, flow_id, place, id, up_id, up)
  cascade.count_resolved(c, answer)
  return answer
end

-- Adds more edges to members that earlier calls of the same submission created; their joins already
-- count these edges. They have the form of late edges.
function graph.widen(c, flow_id, more)
  local f, ended, wide = flow.read(c, flow_id), {}, {}
  for _, each in ipairs(more) do
    local id = edges.id_of(c, each[6])
    wide[id] = true
    if server.call('HEXISTS', K.edges(c.tag, flow_id), each[1]) == 0 then
      local e, up, place = graph.add_edge(c, flow_id, f, id, each, 'u')
      if up.rank >= upstream(c, id).rank then set_rank(c, id, up.rank + 1) end
      if S.is_terminal(up.state) then ended[#ended + 1] = { id, place, e.upstream } end
    end
  end
  for _, each in ipairs(ended) do
    graph.resolve_ended(c, flow_id, each[2], each[1], each[3])
  end
  for id in pairs(wide) do cascade.cancel_later(c, id) end
end

-- Applies a staged edge. Returns how many edges of the child are open, and the answer of an upstream
-- that has already ended.
function graph.apply(c, flow_id, id, rec, place, e)
  if S.is_terminal(rec.state) then reply.refuse('terminal') end
  e.state = 'u'
  server.call('HSET', K.into(c.tag, flow_id, id), place, edges.format(e))
  local g = edges.group(id, rec)
  g.n = g.n + 1
  -- A decided join stays decided, except that a satisfied join of all also waits for the new edge.
  local reopened = g.state == 'p' or g.state == 's' and not rec.join
  if reopened then g.state = 'p' end
  record.set(c, id, rec, 'deps', edges.group_text(g))
  if e.input ~= '' then record.set(c, id, rec, 'named', '1') end
  if S.is_runnable(rec.state) and reopened and not S.is_blocked_by_dependencies(rec.state) then
    flow.block(c, id, rec)
  end
  local resolution = graph.resolve_ended(c, flow_id, place, id, e.upstream)
  local after = resolution and record.read(c, id) or rec
  return edges.open_count(edges.group(id, after)), resolution
end

local function children(c, flow_id, id)
  local ids = {}
  for i, member in ipairs(server.call('ZRANGE', K.out(c.tag, flow_id, id), 0, -1)) do
    ids[i] = edges.noted(c, member)
  end
  return ids
end

-- The members reached by a walk from `id` along edges, with the ranks required by a new edge to `id`
-- from a member with `rank`. The error if the walk reaches `up_id`, or too many members.
local function walk(c, flow_id, id, up_id, rank)
  local ranks, list, at, visited = { [id] = rank + 1 }, { id }, 1, 0
  while list[at] do
    local each = list[at]
    at, visited = at + 1, visited + 1
    if each == up_id then return nil, reply.err('cycle_detected') end
    if visited > MAX_WALK then return nil, reply.err('cycle_detected', 'graph_too_large') end
    local lowest = ranks[each] + 1
    for _, child in ipairs(children(c, flow_id, each)) do
      local known = upstream(c, child)
      if known and (ranks[child] or known.rank) < lowest then
        ranks[child] = lowest
        list[#list + 1] = child
      elseif child == up_id then
        return nil, reply.err('cycle_detected')
      end
    end
  end
  return ranks
end

-- Whether an edge could close a cycle. None can from a member that no edge leads to.
local function may_close(c, flow_id, up_id, id)
  return upstream(c, up_id).rank >= upstream(c, id).rank
    and server.call('EXISTS', K.into(c.tag, flow_id, up_id)) == 1
end

-- The error if an edge would close a cycle, or nil after raising the ranks of all that follow.
function graph.cycle_problem(c, flow_id, up_id, id)
  local up, child = upstream(c, up_id), upstream(c, id)
  if up.rank < child.rank then return nil end
  -- Lowering the rank of one member is cheaper than raising those of all that follow.
  if not may_close(c, flow_id, up_id, id) then return set_rank(c, up_id, child.rank - 1) end
  local ranks, problem = walk(c, flow_id, id, up_id, up.rank)
  if problem then return problem end
  for each, rank in pairs(ranks) do set_rank(c, each, rank) end
end

-- The existing members upstream of a member, directly or through new members.
local function existing_before(c, created, id, found, seen)
  if not created[id] then
    found[id] = true
  elseif not seen[id] then
    seen[id] = true
    for _, each in ipairs(created[id].deps) do
      existing_before(c, created, edges.id_of(c, each[2]), found, seen)
    end
  end
  return found
end

-- The first error among late edges, those into existing members, or nil; edges that exist are
-- dropped from the list. An edge is { edge_id, upstream uuid, kind letter, input name, reference,
-- child uuid }.
local function late_problem(c, flow_id, late, created)
  local named = {}
  for i = #late, 1, -1 do
    local each = late[i]
    local id, up_id = edges.id_of(c, each[6]), edges.id_of(c, each[2])
    if server.call('HEXISTS', K.edges(c.tag, flow_id), each[1]) == 1 then
      table.remove(late, i)
    else
      for _, member in ipairs({ up_id, id }) do
        local known = upstream(c, member)
        if not created[member] and (not known or known.flow_id ~= flow_id) then
          return reply.err('execution_not_in_flow', member)
        end
      end
      local rec = record.checked(c, id)
      if rec and S.is_terminal(rec.state) then return reply.err('terminal', id) end
      if each[4] ~= '' then
        named[id] = named[id] or {}
        named[id][each[4]] = true
      end
      for before in pairs(existing_before(c, created, up_id, {}, {})) do
        if before == id then return reply.err('cycle_detected') end
        if may_close(c, flow_id, before, id) then
          local _, problem = walk(c, flow_id, id, before, upstream(c, before).rank)
          if problem then return problem end
        end
      end
    end
  end
  for id, names in pairs(named) do
    local problem = graph.input_problem(c, flow_id, id, names)
    if problem then return problem end
  end
end

-- New members that lead to existing ones get lower ranks than these, so that no walk is needed.
local function floor_of(c, fresh, created, late)
  local floor = 0
  for _, each in ipairs(late) do
    if created[edges.id_of(c, each[2])] then
      floor = math.min(floor, upstream(c, edges.id_of(c, each[6])).rank - #fresh)
    end
  end
  return floor
end

-- Whether a flow already has all these members and edges.
function graph.is_stored(c, flow_id, items, late, more)
  local wanted = { late, more }
  for _, item in ipairs(items) do
    local known = upstream(c, item[1])
    if not known or known.flow_id ~= flow_id then return false end
    wanted[#wanted + 1] = item[5].deps
  end
  for _, list in ipairs(wanted) do
    for _, each in ipairs(list) do
      if server.call('HEXISTS', K.edges(c.tag, flow_id), each[1]) == 0 then return false end
    end
  end
  return true
end

-- Adds new members ({ id, kind, payload, encoding, options }, upstreams first), late edges and more
-- edges (as `widen` takes them) to a flow; nothing is written if any of it is refused. `holds`: new
-- members wait until a later call adds the last ones, unless the flow is held anyway. Returns how
-- many members and edges are new.
function graph.extend(c, flow_id, items, late, more, holds)
  local created, fresh = {}, {}
  for _, item in ipairs(items) do
    local known = upstream(c, item[1])
    if not known then
      fresh[#fresh + 1] = item
      created[item[1]] = { deps = item[5].deps or {} }
      local problem = creating.problem(c, item[5])
      if problem then return nil, problem end
      for _, each in ipairs(created[item[1]].deps) do
        local up_id = edges.id_of(c, each[2])
        local up = upstream(c, up_id)
        if not created[up_id] and (not up or up.flow_id ~= flow_id) then
          return nil, reply.err('execution_not_in_flow', up_id)
        end
      end
    elseif known.flow_id ~= flow_id then
      return nil, reply.err('invalid_input', 'nodes.key: ' .. (item[5].node or item[1])
        .. ' names an execution outside the flow')
    end
  end
  local problem = late_problem(c, flow_id, late, created)
  if problem then return nil, problem end
  for _, each in ipairs(more) do
    for _, id in ipairs({ edges.id_of(c, each[2]), edges.id_of(c, each[6]) }) do
      local known = upstream(c, id)
      if not known or known.flow_id ~= flow_id then
        return nil, reply.err('execution_not_in_flow', id)
      end
    end
  end
  local f, floor = flow.read(c, flow_id), floor_of(c, fresh, created, late)
  if holds and not f.held_from then
    flow.set(c, flow_id, 'held_from', flow.number(f, 'node_count') + 1, 'extending', '1')
  end
  -- First, because the ranks of new members follow from those of their upstreams.
  graph.widen(c, flow_id, more)
  for _, item in ipairs(fresh) do
    item[5].floor = floor
    creating.create(c, unpack(item))
  end
  c:close()
  for _, each in ipairs(late) do
    local id = edges.id_of(c, each[6])
    reply.stop_with(graph.cycle_problem(c, flow_id, edges.id_of(c, each[2]), id))
    local e, _, place = graph.add_edge(c, flow_id, f, id, each, 'g')
    graph.apply(c, flow_id, id, record.checked(c, id), place, e)
  end
  c:close()
  return #fresh + #late
end

-- Releases members that were held until their whole extension was stored.
function graph.end_extension(c, flow_id)
  if not flow.read(c, flow_id).extending then return end
  flow.clear(c, flow_id, 'extending')
  flow.release(c, flow_id)
  c:close()
end

-- The items and edges from the arguments: number of items, items, late edges and more edges, each a
-- msgpack list.
function graph.parts(args, first, common)
  local items, at = {}, first + 1
  for i = 1, tonumber(args[first]) do
    items[i] = { args[at], args[at + 1], args[at + 2], args[at + 3],
      creating.options(common, args[at + 4]) }
    at = at + 5
  end
  return items, cmsgpack.unpack(args[at]), cmsgpack.unpack(args[at + 1] or EMPTY_LIST)
end

function graph.upstream(c, id) return upstream(c, id) end
