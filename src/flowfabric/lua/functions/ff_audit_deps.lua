-- ff_audit_deps: look for members that wait although their upstreams ended and no queue has them
-- left to do; resolve what is found.
-- Keys: core, flow core, in, cascade_backlog, cascade_failed, cascade_poison, and those of the
--   transitions that it makes.
-- Arguments: then per member: execution_id, where the look at its edges continues (0: at the first).
-- Replies: for each member that the call reaches [`consistent` | `resolved` | `unblocked` |
--   error:<why>, where the next look continues (0: all edges were seen)]. Errors: none.
-- Events: completion (members that an edge ends), flow_finished.
local PAGE = 20
-- A small hash is read whole, whatever the page.
local MAX_EDGES = 512

local function is_queued(c, flow_id, up, name)
  return server.call('ZSCORE', K.index(c.tag, 'cascade_backlog'), flow_id .. '|' .. up)
    or server.call('HEXISTS', K.index(c.tag, 'cascade_failed'), name) == 1
    or server.call('HEXISTS', K.index(c.tag, 'cascade_poison'), name) == 1
end

-- Resolves an open edge whose upstream has ended; true if it counted now.
local function settle(c, id, rec, place, e)
  local up_id = edges.id_of(c, e.upstream)
  local state = server.call('HGET', K.core(c.tag, up_id), 'state')
  if not state then error(id .. ': edge ' .. e.id .. ': its upstream does not exist', 0) end
  if not S.is_code(state) or not S.is_terminal(state) then return false end
  local name = cascade.edge_name(rec.flow_id, place, e.upstream, edges.uuid_of(id))
  if is_queued(c, rec.flow_id, e.upstream, table.concat(name, '|')) then return false end
  local answer = cascade.unit(c, name, cascade.resolve, rec.flow_id, place, id, up_id,
    record.read(c, up_id))
  return answer ~= nil and answer ~= 'already_resolved' and answer ~= 'invalid_dependency'
end

-- A join that is decided, or has nothing open, holds nobody; a subflow waits for its child flow.
local function unblock(c, id, rec)
  local g = edges.group(id, rec)
  if rec.execution_kind == 'subflow' or (g.state ~= 's' and edges.open_count(g) > 0) then
    return false
  end
  local verdict = g.state ~= 'p' and g.state or edges.verdict(c, id, rec, g)
  if not verdict then return false end
  g.state = verdict
  cascade.move(c, id, rec, verdict, { 'deps', edges.group_text(g) })
  return true
end

local function look(c, id, cursor, seen)
  local rec = record.checked(c, id)
  if not rec or not S.is_blocked_by_dependencies(rec.state) then return 'consistent', '0' end
  if not rec.flow_id then error(id .. ': flow_id: is missing though it waits for members', 0) end
  local found, page = false, server.call('HSCAN', K.into(c.tag, rec.flow_id, id), cursor, 'COUNT', PAGE)
  for i = 1, #page[2], 2 do
    if cascade.room(c) <= 0 then return found and 'resolved' or 'consistent', cursor end
    seen.edges = seen.edges + 1
    local e = edges.parse(id, page[2][i + 1])
    if e.state == 'u' and settle(c, id, rec, page[2][i], e) then found = true end
  end
  if found then return 'resolved', page[1] end
  return unblock(c, id, rec) and 'unblocked' or 'consistent', page[1]
end

register('ff_audit_deps', function(keys, args)
  local c, answers, seen = Context.open(keys[1], true), {}, { edges = 0 }
  for i = 1, #args, 2 do
    if seen.edges >= MAX_EDGES or cascade.room(c) <= 0 then break end
    local ok, verdict, cursor = try(look, c, args[i], args[i + 1], seen)
    answers[#answers + 1] = ok and { verdict, cursor } or { 'error:' .. verdict, '0' }
  end
  c:close()
  return reply.ok(answers)
end, { 'allow-oom' })
