-- Edges and joins. An edge is stored with its child as one line: letters of state and kind, number,
-- upstream, times since the flow's creation (made, resolved) around the run that it was resolved
-- by, input name, reference. A join is all inbound edges of a child; its record has the counters
-- (`deps`) and, unless all must succeed, the policy (`join`).

edges.KINDS = { success_only = 's', terminal = 't', failure_only = 'f' }
local SATISFIED_BY = {
  s = { s = true }, f = { f = true, x = true },
  t = { s = true, f = true, c = true, x = true, k = true },
}
local EDGE = '^(%l)(%l) (%d+) (%S+) (%d+)/(%d*)/(%d*) ([%w_]*) ?(.*)$'

-- Which counter of the join an edge is in, by its state. The others are staged (g), unsatisfied (u).
edges.COUNTERS = { s = 'succeeded', i = 'failed', k = 'skipped' }
function edges.is_impossible(e) return e.state == 'i' or e.state == 'k' end

function edges.parse(id, text)
  local state, kind, number, upstream, made, run, resolved, input, ref = string.match(text, EDGE)
  if not state then error(id .. ": edge: '" .. text .. "' is not an edge", 0) end
  return { state = state, kind = kind, number = tonumber(number), upstream = upstream, made = made,
    run = run, resolved = resolved, input = input, ref = ref }
end

function edges.format(e)
  return table.concat({ e.state, e.kind, ' ', values.text(e.number), ' ', e.upstream, ' ', e.made,
    '/', e.run, '/', e.resolved, ' ', e.input, ' ', e.ref })
end

function edges.satisfied_by(e, outcome) return SATISFIED_BY[e.kind][outcome] == true end

function edges.id_of(c, uuid) return c.tag .. ':' .. uuid end
function edges.uuid_of(id) return string.sub(id, -36) end

-- Counters: applied edges, succeeded, failed, skipped. States: pending, satisfied, impossible.
function edges.group(id, rec)
  if not rec.deps then return { n = 0, succeeded = 0, failed = 0, skipped = 0, state = 'p' } end
  local n, succeeded, failed, skipped, state =
    string.match(rec.deps, '^(%d+) (%d+) (%d+) (%d+) (%l)$')
  if not n then error(id .. ": deps: '" .. rec.deps .. "' are not counters", 0) end
  return { n = tonumber(n), succeeded = tonumber(succeeded), failed = tonumber(failed),
    skipped = tonumber(skipped), state = state }
end

function edges.group_text(g)
  return string.format('%d %d %d %d %s', g.n, g.succeeded, g.failed, g.skipped, g.state)
end

-- The policy of a child whose edges need not all succeed, or nil. `cancels`: the others are
-- cancelled when the join is decided; `spares`: unless they feed another undecided join.
function edges.join(rec)
  if not rec.join then return nil end
  local kind, k, cancels, spares = string.match(rec.join, '^(%l) (%d+) (%l) (%d)$')
  return { kind = kind, k = tonumber(k), cancels = cancels == 'c', spares = spares == '1' }
end

-- How the counters decide a join: `s`, `i`, or nil while it is open.
function edges.verdict(c, id, rec, g)
  local join = edges.join(rec)
  if not join then
    if g.failed + g.skipped > 0 then return 'i' end
    return g.succeeded == g.n and 's' or nil
  end
  if g.succeeded >= join.k then return 's' end
  local staged = server.call('HLEN', K.into(c.tag, rec.flow_id, id))
  if staged >= join.k and g.failed + g.skipped > staged - join.k then return 'i' end
end

-- Open edges of a child, so that an operator sees what it waits for.
function edges.open_count(g) return g.n - g.succeeded - g.failed - g.skipped end

-- What the satisfied named edges of a child pass on, each as name, upstream, outcome, result and its
-- encoding; then the upstream whose end decided a join of any or some.
function edges.inputs(c, id, rec)
  local passed, fired_by = {}, false
  local flat = server.call('HGETALL', K.into(c.tag, rec.flow_id, id))
  for i = 1, #flat, 2 do
    local e = edges.parse(id, flat[i + 1])
    local up_id = edges.id_of(c, e.upstream)
    if rec.join and tonumber(rec.decided_by) == e.number and e.state == 's' then fired_by = up_id end
    if e.state == 's' and e.input ~= '' then
      local up = server.call('HMGET', K.core(c.tag, up_id), 'state', 'result_encoding')
      passed[#passed + 1] = { e.input, up_id, up[1] and S.outcome_name(up[1]) or 'none',
        server.call('GET', K.result(c.tag, up_id)), up[2] }
    end
  end
  return { passed, fired_by }
end
