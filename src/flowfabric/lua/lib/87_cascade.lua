-- Resolves what depends on an ended member, in the same call. A call does a limited number of units:
-- an edge resolved, a member skipped or cancelled. Members with unresolved edges stay in
-- `cascade_backlog`, joins with siblings to cancel in `pending_cancel_groups`, and units that fail
-- because a record is damaged in `cascade_failed`; a failed unit never stops the others.

local PAGE = 64
local MAX_FAILURES = 5
-- How many pages of siblings one call reads.
local MAX_PAGES = 16
local MAX_CHILDREN = 256

function cascade.room(c)
  c.units = c.units or SETTINGS.cascade_units
  return c.units
end

function cascade.spend(c, units) c.units = cascade.room(c) - units end

local function spend(c) cascade.spend(c, 1) end

function cascade.counts(c)
  c.counts = c.counts or { resolved = 0, promoted = 0, skipped = 0, cancelled = 0, pending = 0 }
  return c.counts
end

local function add(c, what) cascade.counts(c)[what] = cascade.counts(c)[what] + 1 end

local NO_VERDICT = { already_resolved = true, invalid_dependency = true }

function cascade.count_resolved(c, answer)
  if answer and not NO_VERDICT[answer] then add(c, 'resolved') end
end

-- The part of the reply that counts what the call did for other members; nil if nothing.
function cascade.told(c)
  flow.settle(c)
  local done = c.counts
  return done and { done.resolved, done.promoted, done.skipped, done.cancelled, done.pending }
end

-- The name under which a failed unit is retried: its parts, joined by `|`.
function cascade.edge_name(flow_id, place, up, child)
  return { 'e', flow_id, place, up, child }
end

local function name_of(flow_id, id) return flow_id .. '|' .. edges.uuid_of(id) end

-- Records a failed unit, to be retried. After several failures, sets it aside and returns true.
function cascade.note_failure(c, what, why)
  local key = K.index(c.tag, 'cascade_failed')
  local before = server.call('HGET', key, what)
  local count = tonumber(before and string.match(before, '^%d+') or 0) + 1
  if count > MAX_FAILURES then
    server.call('HDEL', key, what)
    server.call('HSET', K.index(c.tag, 'cascade_poison'), what, why)
    return true
  end
  server.call('HSET', key, what, values.text(count) .. ' ' .. why)
  cascade.counts(c).pending = 1
end

-- Does one unit, whose failure affects no other. The members listed after it may have changed before
-- it failed, so what depends on them is checked again.
function cascade.unit(c, what, handle, ...)
  spend(c)
  local ok, answer = try(handle, c, ...)
  if ok then return answer end
  cascade.note_failure(c, table.concat(what, '|'), answer)
end

local function postpone(c, flow_id, id)
  server.call('ZADD', K.index(c.tag, 'cascade_backlog'), 'NX', c.now, name_of(flow_id, id))
  cascade.counts(c).pending = 1
end

-- Replaces the child's payload with the upstream's result, if the edge says so. Of several such
-- edges, the one staged last wins.
local function pass_result(c, id, rec, e, up_id, up)
  if e.ref == '' or tonumber(rec.passed or 0) >= e.number then return false end
  local result = record.result(c, up_id, up)
  if not result then return false end
  -- A payload never moves from its key to the record, because readers check the record first.
  if record.is_small(result) and not rec.payload_key then
    record.set(c, id, rec, 'payload', result)
  else
    server.call('SET', K.payload(c.tag, id), result)
    record.set(c, id, rec, 'payload_key', '1')
    record.clear(c, id, rec, 'payload')
  end
  record.set(c, id, rec, 'passed', values.text(e.number))
  if up.result_encoding then
    record.set(c, id, rec, 'payload_encoding', up.result_encoding)
  else
    record.clear(c, id, rec, 'payload_encoding')
  end
  return true
end

-- Whether a member feeds another undecided join. Only the first of very many children are checked; the
-- member then counts as one that does.
local function feeds_another(c, flow_id, up_id, child)
  local key = K.out(c.tag, flow_id, up_id)
  local members = server.call('ZRANGE', key, 0, MAX_CHILDREN - 1)
  cascade.spend(c, math.floor(#members / PAGE))
  for _, member in ipairs(members) do
    local other = edges.noted(c, member)
    if other ~= child then
      local found = server.call('HMGET', K.core(c.tag, other), 'state', 'deps')
      if found[1] and not S.is_terminal(found[1])
          and edges.group(other, { deps = found[2] }).state == 'p' then
        return true
      end
    end
  end
  return #members == MAX_CHILDREN
end

local function cancel_sibling(c, flow_id, child, up_id, reason, spares)
  local up = record.checked_lease(c, up_id)
  local found = not up and 'not_found' or S.is_terminal(up.state) and 'already_terminal'
  if found then return reply.add_effect('C' .. reason .. ':' .. found) end
  if spares and feeds_another(c, flow_id, up_id, child) then return end
  ending.cancel(c, up_id, up, 'flow_cascade', reason)
  reply.add_effect('C' .. reason .. ':cancelled')
  add(c, 'cancelled')
end

-- A cheap check whether an upstream can still be cancelled; true if its record is unreadable.
local function may_live(c, up_id)
  local ok, state = try(server.call, 'HGET', K.core(c.tag, up_id), 'state')
  return not ok or (state and not (S.is_code(state) and S.is_terminal(state)))
end

-- The lines of the existing edges into a child with these places.
local function lines_at(key, first, last)
  local places = {}
  for place = first, last do places[#places + 1] = place end
  return server.call('HMGET', key, unpack(places))
end

-- Cancels upstreams that a decided join no longer needs; true if all are handled. The scan continues
-- after the last edge that an earlier call handled, so that spared upstreams are checked only once.
function cascade.cancel_siblings(c, id, rec)
  local join, flow_id = edges.join(rec), rec.flow_id
  local key, place = K.into(c.tag, flow_id, id), tonumber(rec.sibling_scan or 0)
  -- Edges that came after the decision do not belong to it.
  local reason, last = string.match(rec.siblings, '^(%S+) (%d+)$')
  local function stop()
    record.set(c, id, rec, 'sibling_scan', values.text(place))
    return false
  end
  for _ = 1, MAX_PAGES do
    for _, line in ipairs(lines_at(key, place + 1, place + PAGE)) do
      local e = line and edges.parse(id, line)
      if not e or e.number > tonumber(last) then
        record.clear(c, id, rec, 'sibling_scan', 'siblings')
        return true
      end
      local up_id = edges.id_of(c, e.upstream)
      if e.state == 'u' and may_live(c, up_id) then
        if cascade.room(c) <= 0 then return stop() end
        cascade.unit(c, { 's', flow_id, edges.uuid_of(id), e.upstream },
          function() cancel_sibling(c, flow_id, id, up_id, reason, join.spares) end)
      end
      place = place + 1
    end
  end
  return stop()
end

local REASONS = { s = 'sibling_quorum_satisfied', i = 'sibling_quorum_impossible' }

-- Schedules the cancellation of upstreams whose edges were added after their join was decided.
function cascade.cancel_later(c, id)
  local rec = record.read(c, id)
  local join = rec and edges.join(rec)
  if not join or not join.cancels or not rec.decided_at then return end
  record.set(c, id, rec, 'siblings', REASONS[edges.group(id, rec).state] .. ' '
    .. flow.read(c, rec.flow_id).edge_count)
  server.call('SADD', K.index(c.tag, 'pending_cancel_groups'), name_of(rec.flow_id, id))
  cascade.counts(c).pending = 1
end

-- Moves the child of a join that has just been decided, with the given fields for its record.
function cascade.move(c, id, rec, verdict, fields)
  if not S.is_blocked_by_dependencies(rec.state) or rec.subflow_open then
    -- A running or suspended child checks its join when it next waits.
    for i = 1, #fields, 2 do record.set(c, id, rec, fields[i], fields[i + 1]) end
    return
  end
  local f = flow.ending_member(c, rec, flow.resumes(c, rec))
  if f then
    ending.cancel(c, id, rec, 'flow_cascade', f.cancel_reason, fields)
    add(c, 'cancelled')
  elseif verdict == 's' then
    flow.move_on(c, id, rec, unpack(fields))
    add(c, 'promoted')
  else
    spend(c)
    ending.skip(c, id, rec, fields)
    add(c, 'skipped')
  end
end

-- Stores how a join was decided, moves its child, and cancels the upstreams that it no longer needs.
local function decide(c, id, rec, verdict, e, fields)
  local join, groups = edges.join(rec), K.index(c.tag, 'pending_cancel_groups')
  if join then
    values.append(fields, { 'decided_at', values.text(c.now), 'decided_by', values.text(e.number) })
  end
  local name = name_of(rec.flow_id, id)
  if join and join.cancels then
    local last = flow.read(c, rec.flow_id).edge_count
    values.append(fields, { 'siblings', REASONS[verdict] .. ' ' .. last })
    server.call('SADD', groups, name)
    record.clear(c, id, rec, 'sibling_scan')
  end
  cascade.move(c, id, rec, verdict, fields)
  if not (join and join.cancels) then return end
  if cascade.cancel_siblings(c, id, rec) then
    server.call('SREM', groups, name)
  else
    cascade.counts(c).pending = 1
  end
end

-- Resolves one child's edge from an ended upstream. Returns satisfied, impossible, pending,
-- already_fired, already_resolved or invalid_dependency; and whether the child got the result, or was
-- skipped.
function cascade.resolve(c, flow_id, place, id, up_id, up)
  local key, f = K.into(c.tag, flow_id, id), flow.read(c, flow_id)
  local text = server.call('HGET', key, place)
  local e = text and edges.parse(id, text)
  if not f or not e or e.state == 'g' or e.upstream ~= edges.uuid_of(up_id) then
    return 'invalid_dependency'
  end
  if e.state ~= 'u' then return 'already_resolved' end
  local run = tonumber(up.replay_count or 0)
  -- After a replay of the child, only a later run of the upstream counts.
  if e.run ~= '' and run <= tonumber(e.run) then return 'already_resolved' end
  local rec = record.checked(c, id)
  if not rec then return 'invalid_dependency' end
  local g = edges.group(id, rec)
  if edges.open_count(g) < 1 then error(id .. ': deps: invariant_violation: ' .. rec.deps, 0) end
  local outcome = S.outcome(up.state)
  local good = edges.satisfied_by(e, outcome)
  e.state, e.run = good and 's' or outcome == 'k' and 'k' or 'i', values.text(run)
  local count = edges.COUNTERS[e.state]
  g[count] = g[count] + 1
  e.resolved = values.text(c.now - tonumber(f.created_at))
  server.call('HSET', key, place, edges.format(e))
  local was_open = g.state == 'p'
  local verdict = was_open and edges.verdict(c, id, rec, g) or nil
  g.state = verdict or g.state
  local injected = good and not S.is_terminal(rec.state) and (not rec.join or verdict == 's')
    and pass_result(c, id, rec, e, up_id, up)
  if verdict then
    decide(c, id, rec, verdict, e, { 'deps', edges.group_text(g) })
    -- The delay is zero in the call that ended the upstream.
    local ended = verdict == 's' and tonumber(up.completed_at) or c.now
    if ended < c.now then reply.add_effect('H' .. values.text(c.now - ended)) end
  else
    record.set(c, id, rec, 'deps', edges.group_text(g))
  end
  if rec.join and not verdict then
    return was_open and 'pending' or 'already_fired', injected
  end
  if good then return 'satisfied', injected end
  return 'impossible', verdict == 'i' and S.is_terminal(rec.state)
end

-- Resolves the edges that leave an ended member; false if some are left.
local function resolve_edges(c, flow_id, id, rec)
  local key, from = K.out(c.tag, flow_id, id), rec.cascaded or '0'
  local up = edges.uuid_of(id)
  while cascade.room(c) > 0 do
    local limit = math.min(PAGE, cascade.room(c))
    local page = server.call('ZRANGE', key, '(' .. from, '+inf', 'BYSCORE', 'LIMIT', 0, limit,
      'WITHSCORES')
    local taken = 0
    for i = 1, #page, 2 do
      if cascade.room(c) <= 0 then break end
      local child_id, place = edges.noted(c, page[i])
      local answer = cascade.unit(c, cascade.edge_name(flow_id, place, up, edges.uuid_of(child_id)),
        cascade.resolve, flow_id, place, child_id, id, rec)
      cascade.count_resolved(c, answer)
      from, taken = page[i + 1], taken + 2
    end
    if taken == #page and #page < 2 * limit then
      if rec.cascaded then record.clear(c, id, rec, 'cascaded') end
      return true
    end
  end
  record.set(c, id, rec, 'cascaded', from)
  return false
end

local function process(c, work)
  local i = 1
  while work[i] do
    local each = work[i]
    if not resolve_edges(c, each.rec.flow_id, each.id, each.rec) then
      postpone(c, each.rec.flow_id, each.id)
    elseif each.marked then
      server.call('ZREM', K.index(c.tag, 'cascade_backlog'), name_of(each.rec.flow_id, each.id))
    end
    work.done = i
    i = i + 1
  end
end

-- Resolves what depends on these ended members ({ id, rec, marked }), and on members that end as a
-- result. If something fails, their own end remains valid, and the rest stays in the backlog.
function cascade.run(c, work)
  c.work = work
  local ok, why = pcall(process, c, work)
  c.work = nil
  if not ok then
    c.refused = why
    for i = (work.done or 0) + 1, #work do
      pcall(postpone, c, work[i].rec.flow_id, work[i].id)
    end
  end
end

-- A member with edges ended.
function cascade.ended(c, id, rec)
  local each = { id = id, rec = rec }
  if not c.work then return cascade.run(c, { each }) end
  c.work[#c.work + 1] = each
end

-- Retries a failed unit; `entry` as recorded by `unit`. Callers deliver messages themselves.
function cascade.retry(c, entry)
  if string.sub(entry, 1, 2) == 'm|' then return end
  local kind, flow_id, a, b, d = string.match(entry, '^(%a)|([^|]+)|([^|]+)|?([^|]*)|?([^|]*)$')
  local key = K.index(c.tag, 'cascade_failed')
  spend(c)
  local ok, why = try(function()
    if kind == 'e' then
      local up_id = edges.id_of(c, b)
      local up = record.read(c, up_id)
      if up and S.is_terminal(up.state) then
        cascade.resolve(c, flow_id, a, edges.id_of(c, d), up_id, up)
      end
    elseif kind == 's' then
      local id = edges.id_of(c, a)
      local rec = record.read(c, id)
      local join = rec and edges.join(rec)
      local reason = rec and REASONS[edges.group(id, rec).state]
      if join and reason then
        cancel_sibling(c, flow_id, id, edges.id_of(c, b), reason, join.spares)
      end
    elseif kind == 'f' then
      local f = flow.read(c, flow_id)
      if f and f.finished_at then subflows.finished(c, flow_id, f, a) end
    elseif kind == 'c' then
      flow_cancel.member(c, flow_id, edges.id_of(c, a))
    elseif kind == 'r' or kind == 'R' then
      local id = edges.id_of(c, a)
      replaying.reopen(c, { { id = id, rec = record.read(c, id) } }, kind == 'R')
    elseif kind == 'p' or kind == 'P' or kind == 'w' then
      local id = edges.id_of(c, a)
      local _, rec = replaying.member(c, id, ({ p = 'f', P = 'a', w = 'w' })[kind])
      if rec and rec.out then replaying.reopen(c, { { id = id, rec = rec } }, kind == 'w') end
    elseif kind == 'h' then
      local id = edges.id_of(c, a)
      local rec = record.checked(c, id)
      if rec and S.is_held(rec.state) then flow.move_on(c, id, rec) end
    end
  end)
  if ok then
    server.call('HDEL', key, entry)
  else
    cascade.note_failure(c, entry, why)
  end
end

-- Reports to its parent that a flow has finished, as a unit.
function cascade.tell_parent(c, flow_id, f, state)
  cascade.unit(c, { 'f', flow_id, state }, subflows.finished, flow_id, f, state)
end

-- Cancels one member for its cancelled flow, as a unit.
function cascade.cancel_member(c, flow_id, id)
  return cascade.unit(c, { 'c', flow_id, edges.uuid_of(id) }, function()
    return flow_cancel.member(c, flow_id, id)
  end)
end

-- Releases a held member, as a unit; true if it was held.
function cascade.release_member(c, flow_id, id)
  return cascade.unit(c, { 'h', flow_id, edges.uuid_of(id) }, function()
    local rec = record.checked(c, id)
    if not rec or not S.is_held(rec.state) then return false end
    flow.move_on(c, id, rec)
    add(c, 'promoted')
    return true
  end)
end
