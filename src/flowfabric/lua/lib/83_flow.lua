-- A flow's record: a hash with the fields of its creation, and `counters`, a msgpack list: number of
-- changes, members that have not ended, members that are not trimmed, members and edges ever added,
-- the graph's revision, then members by public state (engine/valkey/flow_records.py has the same
-- order). One short field is cheapest to read and write with each step of a member. `held_from`:
-- members with this number or a higher one wait for the release of the flow.

local ENDS_MEMBERS = { cancel_all = true, cancel_pending = true }
local ABANDONED_MS, RETENTION_MS = 3600000, 86400000

-- The place of each counter. `changes` shows an audit of several calls that the flow has changed.
local CHANGES, LIVE, KEPT, NODES, EDGES, REVISION = 1, 2, 3, 4, 5, 6
local PLACES = { changes = CHANGES, live = LIVE, kept = KEPT }
for i = 1, #S.PUBLIC do PLACES['members_' .. S.PUBLIC[i]] = REVISION + i end
local COUNTERS = REVISION + #S.PUBLIC

local function no_counters()
  local counters = {}
  for place = 1, COUNTERS do counters[place] = 0 end
  return counters
end

local function with_counters(f)
  local counters = f.counters and cmsgpack.unpack(f.counters) or no_counters()
  if #counters ~= COUNTERS then error('counters: are not ' .. COUNTERS .. ' numbers', 0) end
  f.counters = counters
  f.node_count, f.edge_count, f.graph_revision =
    counters[NODES], counters[EDGES], counters[REVISION]
  return f
end

-- The record, or nil. It is read once per call.
function flow.read(c, flow_id)
  c.flows = c.flows or {}
  local known = c.flows[flow_id]
  if known == nil then
    local flat = server.call('HGETALL', K.flow(c.tag, flow_id))
    -- Preallocated for the usual fields.
    known = #flat > 0 and with_counters(values.fields(flat, {
      namespace = 'default', flow_kind = nil, created_at = nil, last_mutation_at = nil,
      digest = nil, counters = nil, node_count = nil, edge_count = nil, graph_revision = nil,
      finished_at = nil,
    }))
    c.flows[flow_id] = known
  end
  return known or nil
end

-- Writes name, value pairs.
function flow.set(c, flow_id, ...)
  server.call('HSET', K.flow(c.tag, flow_id), ...)
  local f = flow.read(c, flow_id)
  for i = 1, select('#', ...), 2 do
    local name, value = select(i, ...)
    f[name] = type(value) == 'number' and values.text(value) or value
  end
end

function flow.clear(c, flow_id, ...)
  server.call('HDEL', K.flow(c.tag, flow_id), ...)
  local f = flow.read(c, flow_id)
  for _, name in ipairs({ ... }) do f[name] = nil end
end

-- Makes a flow without members. `more`: digest, tags, parent and depth of a submitted one.
function flow.create(c, flow_id, kind, namespace, more)
  more = more or {}
  server.call('ZADD', K.index(c.tag, 'flow_index'), 0, flow_id)
  c.flows[flow_id] = with_counters({ namespace = namespace })
  local fields = { 'flow_kind', kind, 'created_at', c.now, 'last_mutation_at', c.now }
  if namespace ~= 'default' then values.add(fields, 'namespace', namespace) end
  values.add(fields, 'digest', more.digest)
  values.add(fields, 'parent_execution_id', more.parent)
  values.add(fields, 'depth', more.depth)
  flow.set(c, flow_id, unpack(fields))
  if more.tags then server.call('HSET', K.flow_tags(c.tag, flow_id), unpack(more.tags)) end
  return flow.read(c, flow_id)
end

function flow.number(f, name)
  local place = PLACES[name]
  return place and f.counters[place] or tonumber(f[name] or 0)
end

-- When a flow may be deleted, or nil: some time after its submission was abandoned, or after it ended
-- and its last member was deleted; at once if its parent was deleted.
local function deletion_due(c, f)
  if f.deleting then return c.now end
  if f.submitting then return clock.after(tonumber(f.submitting), ABANDONED_MS) end
  local ended = math.max(flow.number(f, 'finished_at'), flow.number(f, 'cancelled_at'))
  if ended == 0 or flow.number(f, 'live') > 0 then return nil end
  if f.orphan then return c.now end
  return flow.number(f, 'kept') == 0 and clock.after(ended, RETENTION_MS) or nil
end

-- Schedules the flow for deletion in the projector's index, or removes it from there.
function flow.expect_deletion(c, flow_id, f)
  local due = deletion_due(c, f)
  if due then
    server.call('ZADD', K.index(c.tag, 'flow_due'), due, flow_id)
  else
    server.call('ZREM', K.index(c.tag, 'flow_due'), flow_id)
  end
  return due
end

function flow.is_cancelled(f) return f.cancelled_at ~= nil end

-- Flows are hidden while they are being submitted or deleted.
function flow.is_shown(f) return not f.submitting and not f.deleting end

-- When a visible flow was created, or nil; for calls that only read.
function flow.shown_since(tag, flow_id)
  local found = server.call('HMGET', K.flow(tag, flow_id), 'created_at', 'submitting', 'deleting')
  return found[1] and not found[2] and not found[3] and found[1] or nil
end

-- The record of a visible flow; ends the call if there is none.
function flow.shown(c, flow_id)
  local f = flow.read(c, flow_id)
  if not f or not flow.is_shown(f) then reply.refuse('flow_not_found') end
  return f
end

-- The flow's record for a call that changes it; ends the call if it is missing or cancelled.
-- `submits`: the call is part of its submission.
function flow.live(c, flow_id, submits)
  local f = submits and flow.read(c, flow_id) or flow.shown(c, flow_id)
  if flow.is_cancelled(f) then reply.refuse('flow_already_terminal') end
  return f
end

-- The state derived from all members; exact, because every transition is counted.
function flow.derived(f)
  local function any(...)
    for _, state in ipairs({ ... }) do
      if flow.number(f, 'members_' .. state) > 0 then return true end
    end
  end
  if flow.number(f, 'live') > 0 then
    if any('active') then return 'running' end
    if any('suspended', 'delayed', 'rate_limited', 'waiting_children') then return 'blocked' end
    return 'open'
  end
  if flow.number(f, 'node_count') == 0 then return 'open' end
  return any('failed', 'cancelled', 'expired') and 'failed' or 'completed'
end

function flow.ends_members(f) return ENDS_MEMBERS[f.cancellation_policy] == true end

-- The cancelled flow because of which a member may no longer run, or nil. `resumes`: the member
-- continues an attempt that was running at the cancellation, which `cancel_pending` allows.
function flow.ending_member(c, rec, resumes)
  local f = rec.flow_id and flow.read(c, rec.flow_id)
  if not f or not flow.ends_members(f) then return nil end
  if resumes and f.cancellation_policy == 'cancel_pending' then return nil end
  return f
end

-- Whether a waiting member of a cancelled flow may continue its attempt: only once the drain has
-- ended the members that were waiting when the flow was cancelled.
function flow.resumes(c, rec)
  return S.has_paused_attempt(rec.state)
    and not (rec.flow_id and server.call('ZSCORE', K.index(c.tag, 'cancel_backlog'), rec.flow_id))
end

-- Whether a flow that was submitted held still holds the member.
function flow.holds(c, id, rec)
  local f = rec.flow_id and flow.read(c, rec.flow_id)
  local from = f and tonumber(f.held_from)
  if not from then return false end
  local number = server.call('ZSCORE', K.members(c.tag, rec.flow_id), id)
  return number and tonumber(number) >= from
end

-- The state of a runnable execution whose dependencies are met, and what still blocks it, if anything.
function flow.unblocked(c, id, rec)
  local attempt = S.attempt(rec.state)
  if attempt == 'n' then attempt = 'f' end
  if flow.holds(c, id, rec) then
    server.call('RPUSH', K.held(c.tag, rec.flow_id), id)
    return S.held(attempt), 'flow held'
  end
  if tonumber(rec.delay_until or 0) > c.now then return S.delayed('d', attempt) end
  if subflows.is_node(rec) then return subflows.state(rec, attempt) end
  return S.eligible(attempt)
end

-- Makes a member that could run wait for its dependencies.
function flow.block(c, id, rec)
  waiting.leave(c, id, rec)
  record.transition(c, id, rec, S.waiting_children(S.attempt(rec.state)),
    'last_transition_at', c.now)
  waiting.enter(c, id, rec)
end

-- Moves a member that is no longer blocked to its new state and indexes; `...` are further fields.
function flow.move_on(c, id, rec, ...)
  local state, detail = flow.unblocked(c, id, rec)
  waiting.leave(c, id, rec)
  if rec.blocking_detail and not detail then record.clear(c, id, rec, 'blocking_detail') end
  if state == S.NEW and claiming.keep(c, id, rec, ...) then return end
  record.transition(c, id, rec, state, 'last_transition_at', values.text(c.now), ...)
  if detail then record.set(c, id, rec, 'blocking_detail', detail) end
  waiting.enter(c, id, rec)
  if S.is_eligible(state) then waiting.ring(c, rec) end
  if S.is_blocked_by_dependencies(state) then subflows.open(c, id, rec) end
end

-- Releases held members, within the limit of the call; true if none is left.
function flow.release(c, flow_id)
  local backlog = K.index(c.tag, 'release_backlog')
  if flow.read(c, flow_id).held_from then
    flow.clear(c, flow_id, 'held_from')
    server.call('ZADD', backlog, c.now, flow_id)
  end
  local key, released = K.held(c.tag, flow_id), 0
  while cascade.room(c) > 0 do
    local ids = server.call('LPOP', key, cascade.room(c))
    if not ids then
      server.call('ZREM', backlog, flow_id)
      return true, released
    end
    for _, id in ipairs(ids) do
      if cascade.release_member(c, flow_id, id) then released = released + 1 end
    end
  end
  cascade.counts(c).pending = 1
  return false, released
end

-- The changes to a flow's counters in this call so far; `settle` writes them.
function flow.tally(c, flow_id)
  c.tally = c.tally or {}
  local tally = c.tally[flow_id]
  if not tally then
    tally = {}
    c.tally[flow_id] = tally
  end
  return tally
end

-- The counter of members in a state. States that are not terminal come first.
local counter = values.memo(function(code) return PLACES['members_' .. S.public(code)] end)
local LAST_LIVE = PLACES.members_suspended

local function add(tally, place, by) tally[place] = (tally[place] or 0) + by end

-- Records a member's change of state (nil: it joined); `settle` writes it at the end of the call.
function flow.count(c, flow_id, before, after)
  local old, new = before and counter(before), counter(after)
  if old == new then return end
  local tally = flow.tally(c, flow_id)
  local live = new <= LAST_LIVE and 1 or 0
  if old then
    tally[old] = (tally[old] or 0) - 1
    if old <= LAST_LIVE then live = live - 1 end
  else
    add(tally, KEPT, 1)
  end
  tally[new] = (tally[new] or 0) + 1
  if live ~= 0 then add(tally, LIVE, live) end
end

local function finish(c, flow_id, f)
  local state = flow.derived(f)
  flow.set(c, flow_id, 'finished_at', c.now)
  events.emit_flow(c, 'flow_finished', flow_id, f, 'fs', state)
  reply.add_effect('F' .. state)
  if f.parent_execution_id then cascade.tell_parent(c, flow_id, f, state) end
end

-- Records that a member was deleted; it still counts in its state.
function flow.count_trimmed(c, flow_id, state)
  local f = flow.read(c, flow_id)
  if not f or f.deleting then return end
  local name = 'trimmed_' .. S.public(state)
  flow.set(c, flow_id, name, flow.number(f, name) + 1)
  add(flow.tally(c, flow_id), KEPT, -1)
end

-- Writes the changes of one flow; the record is read, so they are absolute.
local function write(c, flow_id, tally, grown)
  local f = flow.read(c, flow_id)
  if not f then return end
  local counters = f.counters
  if tally then
    for place, by in pairs(tally) do counters[place] = counters[place] + by end
    counters[CHANGES] = counters[CHANGES] + 1
  end
  local key = K.flow(c.tag, flow_id)
  if not grown then return server.call('HSET', key, 'counters', cmsgpack.pack(counters)) end
  counters[NODES], counters[EDGES], counters[REVISION] =
    f.node_count, f.edge_count, f.graph_revision
  f.last_mutation_at = values.text(c.now)
  server.call('HSET', key, 'counters', cmsgpack.pack(counters), 'last_mutation_at',
    f.last_mutation_at)
end

local function check_finished(c, flow_id)
  local f = flow.read(c, flow_id)
  if not f then return end
  local live = flow.number(f, 'live')
  if live == 0 and not f.finished_at and not f.replaying and flow.number(f, 'node_count') > 0 then
    finish(c, flow_id, f)
  elseif live > 0 and f.finished_at then
    flow.clear(c, flow_id, 'finished_at')
  end
  if live == 0 and (f.orphan or flow.number(f, 'kept') == 0) then
    flow.expect_deletion(c, flow_id, f)
  end
end

-- Corrects the counters from the members' public states; returns the differences, each as
-- `<name> <stored>><counted>`. Deleted members count in their last state.
function flow.recount(c, flow_id, f, counts)
  local drift, live, kept = {}, 0, 0
  local function compare(name, counted)
    local stored = flow.number(f, name)
    if stored == counted then return end
    drift[#drift + 1] = name .. ' ' .. values.text(stored) .. '>' .. values.text(counted)
    f.counters[PLACES[name]] = counted
  end
  for _, state in ipairs(S.PUBLIC) do
    local found = counts[state] or 0
    kept = kept + found
    if not S.is_ended(state) then live = live + found end
    compare('members_' .. state, found + flow.number(f, 'trimmed_' .. state))
  end
  compare('live', live)
  compare('kept', kept)
  if #drift > 0 then flow.tally(c, flow_id) end
  return drift
end

-- Writes the call's changes of flows, once, at its end. The end of a flow may change others.
function flow.settle(c)
  for flow_id, added in pairs(c.new_edges or {}) do
    values.call('HSET', K.edges(c.tag, flow_id), added)
  end
  c.new_edges = nil
  while c.tally or c.grown do
    local tallies, grown = c.tally or {}, c.grown or {}
    c.tally, c.grown = nil, nil
    -- An unreadable flow record must not undo changes of members.
    for flow_id, tally in pairs(tallies) do
      if not try(write, c, flow_id, tally, grown[flow_id]) then tallies[flow_id] = nil end
    end
    for flow_id in pairs(grown) do
      if not tallies[flow_id] then
        write(c, flow_id, nil, true)
        tallies[flow_id] = true
      end
    end
    -- After writing all counters, because the end of one flow may end others.
    for flow_id in pairs(tallies) do check_finished(c, flow_id) end
  end
end
