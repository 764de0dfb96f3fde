-- Edges and joins. An edge is stored with its child under its place: the first edge into a child has
-- place 1, and edges are never removed, so that pages of wide joins need no index. Its line has:
-- letters of state and kind, number, upstream, id, times since the flow's creation (made, resolved)
-- around the run that resolved it, input name, reference. A join is the set of all inbound edges of a
-- child; the child's record has the counters (`deps`) and, unless all must succeed, the policy
-- (`join`).

edges.KINDS = { success_only = 's', terminal = 't', failure_only = 'f' }
local SATISFIED_BY = {
  s = { s = true }, f = { f = true, x = true },
  t = { s = true, f = true, c = true, x = true, k = true },
}
local EDGE = '^(%l)(%l) (%d+) (%S+) (%S+) (%d+)/(%d*)/(%d*) ([%w_]*) ?(.*)$'

-- The join's counter for each edge state. The other states are staged (g) and unsatisfied (u).
edges.COUNTERS = { s = 'succeeded', i = 'failed', k = 'skipped' }

-- These read a line without parsing it, because joins may be wide.
function edges.counter(line) return edges.COUNTERS[string.sub(line, 1, 1)] end
function edges.is_impossible(line)
  local counter = edges.counter(line)
  return counter ~= nil and counter ~= 'succeeded'
end
function edges.input_name(line)
  local before = string.find(line, ' ', string.find(line, ' ', 4, true) + 75, true)
  return string.sub(line, before + 1, string.find(line, ' ', before + 1, true) - 1)
end

function edges.parse(id, text)
  local state, kind, number, upstream, edge_id, made, run, resolved, input, ref =
    string.match(text, EDGE)
  if not state then error(id .. ": edge: '" .. text .. "' is not an edge", 0) end
  return { state = state, kind = kind, number = tonumber(number), upstream = upstream, id = edge_id,
    made = made, run = run, resolved = resolved, input = input, ref = ref }
end

function edges.format(e)
  return table.concat({ e.state, e.kind, ' ', values.text(e.number), ' ', e.upstream, ' ', e.id, ' ',
    e.made, '/', e.run, '/', e.resolved, ' ', e.input, ' ', e.ref })
end

function edges.satisfied_by(e, outcome) return SATISFIED_BY[e.kind][outcome] == true end

function edges.id_of(c, uuid) return c.tag .. ':' .. uuid end
function edges.uuid_of(id) return string.sub(id, -36) end

-- References to an edge, kept by its upstream and its flow: the child's id and the edge's place.
function edges.note(id, place) return edges.uuid_of(id) .. ' ' .. place end
function edges.noted(c, text) return edges.id_of(c, string.sub(text, 1, 36)), string.sub(text, 38) end

-- The child, the place and the parts of an edge, or nil. No parts if the child was deleted: the
-- reference remains, and a new child may have the same id.
function edges.find(c, flow_id, edge_id)
  local text = server.call('HGET', K.edges(c.tag, flow_id), edge_id)
  if not text then return nil end
  local id, place = edges.noted(c, text)
  local line = server.call('HGET', K.into(c.tag, flow_id, id), place)
  local e = line and edges.parse(id, line)
  return id, place, e and e.id == edge_id and e or nil
end

local counted = values.memo(function(text)
  local n, succeeded, failed, skipped, state =
    string.match(text, '^(%d+) (%d+) (%d+) (%d+) (%l)$')
  return n and { tonumber(n), tonumber(succeeded), tonumber(failed), tonumber(skipped), state }
end)

-- Counters: applied edges, succeeded, failed, skipped. States: pending, satisfied, impossible.
function edges.group(id, rec)
  local g = counted(rec.deps or '0 0 0 0 p')
  if not g then error(id .. ": deps: '" .. rec.deps .. "' are not counters", 0) end
  return { n = g[1], succeeded = g[2], failed = g[3], skipped = g[4], state = g[5] }
end

function edges.group_text(g)
  return string.format('%d %d %d %d %s', g.n, g.succeeded, g.failed, g.skipped, g.state)
end

-- The policy of a child whose edges need not all succeed, or nil. `cancels`: cancel the other
-- upstreams when the join is decided; `spares`: except those that feed another undecided join.
function edges.join(rec)
  if not rec.join then return nil end
  local kind, k, cancels, spares = string.match(rec.join, '^(%l) (%d+) (%l) (%d)$')
  return { kind = kind, k = tonumber(k), cancels = cancels == 'c', spares = spares == '1' }
end

-- The join's outcome by its counters: `s`, `i`, or nil while it is open.
function edges.verdict(c, id, rec, g)
  local join = edges.join(rec)
  if not join then
    if g.failed + g.skipped > 0 then return 'i' end
    return g.succeeded == g.n and 's' or nil
  end
  if g.succeeded >= join.k then return 's' end
  -- For a child that is being created, the counters may include edges that are not stored yet.
  local staged = math.max(g.n, server.call('HLEN', K.into(c.tag, rec.flow_id, id)))
  if staged >= join.k and g.failed + g.skipped > staged - join.k then return 'i' end
end

-- Open edges of a child, so that an operator sees what it waits for.
function edges.open_count(g) return g.n - g.succeeded - g.failed - g.skipped end

-- How much a claim, or one page, carries of inputs; more takes too long.
local INPUTS, INPUT_BYTES = 200, 1048576
local NONE = {}

local function passed_by(c, e, room)
  local up_id = edges.id_of(c, e.upstream)
  local up = server.call('HMGET', K.core(c.tag, up_id), 'state', 'result_encoding', 'result')
  local result = up[3] or room > 0 and record.result(c, up_id, NONE)
  return { e.input, up_id, up[1] and S.outcome_name(up[1]) or 'none', result, up[2],
    (up[3] or room > 0) and 0 or 1 }, result and #result or 0
end

-- The inputs from these edges that are satisfied and have names, each as name, upstream, outcome,
-- result, its encoding, and whether the result was left out (1 | 0); then the upstream whose end
-- decided an any_of or quorum join. `flat`: ids and lines.
local function inputs(c, id, rec, flat)
  local passed, fired_by, room = {}, false, INPUT_BYTES
  for i = 2, #flat, 2 do
    if edges.counter(flat[i]) == 'succeeded' then
      local e = edges.parse(id, flat[i])
      if rec.join and tonumber(rec.decided_by) == e.number then
        fired_by = edges.id_of(c, e.upstream)
      end
      if e.input ~= '' then
        local bytes
        passed[#passed + 1], bytes = passed_by(c, e, room)
        room = room - bytes
      end
    end
  end
  rec.input_bytes = INPUT_BYTES - room
  return passed, fired_by
end

-- A page of the inputs of a child, and where the next one begins; 0 at the end.
function edges.inputs_page(c, id, rec, cursor)
  local page = server.call('HSCAN', K.into(c.tag, rec.flow_id, id), cursor, 'COUNT', INPUTS)
  local passed, fired_by = inputs(c, id, rec, page[2])
  return passed, fired_by, page[1]
end

-- The inputs for a claim, or `later` if they are too many or too large: the holder then reads pages.
function edges.claimed_inputs(c, id, rec)
  if edges.group(id, rec).n > INPUTS then return 'later' end
  local lines = server.call('HGETALL', K.into(c.tag, rec.flow_id, id))
  local passed, fired_by = inputs(c, id, rec, lines)
  return rec.input_bytes < INPUT_BYTES and { passed, fired_by } or 'later'
end
