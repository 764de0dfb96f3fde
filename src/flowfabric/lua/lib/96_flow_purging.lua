-- Deleting members, and whole flows, a limited number per call.

-- How many members one call deletes, how many children it checks, and when it checks again.
local MEMBERS, CHILDREN, PAGE, AGAIN_MS = 40, 256, 64, 60000
local POISON = 100

local function is_cascading(c, id, rec)
  local name = rec.flow_id .. '|' .. edges.uuid_of(id)
  return rec.cascaded or server.call('ZSCORE', K.index(c.tag, 'cascade_backlog'), name)
end

-- The position after the last child that has ended, and whether all have.
local function past_ended(c, id, rec)
  local key, from = K.out(c.tag, rec.flow_id, id), rec.children_ended or '0'
  for _ = 1, CHILDREN / PAGE do
    local page = server.call('ZRANGE', key, '(' .. from, '+inf', 'BYSCORE', 'LIMIT', 0, PAGE,
      'WITHSCORES')
    for i = 1, #page, 2 do
      local child = edges.noted(c, page[i])
      local ok, state = try(server.call, 'HGET', K.core(c.tag, child), 'state')
      if ok and state and not S.is_terminal(state) then return from, false end
      from = page[i + 1]
    end
    if #page < 2 * PAGE then return from, true end
  end
  return from, false
end

-- Whether a member is still needed: a child of it has not ended, or its end is not resolved there.
-- Later checks start at the first child that had not ended.
function flow_purging.is_needed(c, id, rec)
  if not rec.flow_id then return false end
  local from, all = rec.children_ended, false
  if not rec.out then
    -- The parent of the flow gets its result when the flow finishes.
    local f = flow.read(c, rec.flow_id)
    all = not f or not f.parent_execution_id or f.finished_at or f.deleting
  elseif not is_cascading(c, id, rec) then from, all = past_ended(c, id, rec) end
  if all then return false end
  if from and from ~= rec.children_ended then record.set(c, id, rec, 'children_ended', from) end
  record.set(c, id, rec, 'kept_until', values.text(c:after(AGAIN_MS)))
  c:zadd(K.lane(c.tag, rec.lane_id, 'terminal'), rec.kept_until, id)
  return true
end

-- Removes a member that is being deleted from its flow; the flow keeps counting it.
function flow_purging.forget(c, id, rec)
  graph.remove_member(c, rec.flow_id, id)
  flow.count_trimmed(c, rec.flow_id, rec.state)
end

-- Deletes a member in any state.
local function delete(c, flow_id, id)
  local ok, rec = try(record.read, c, id)
  if not ok or not rec then
    graph.remove_member(c, flow_id, id)
    server.call('UNLINK', K.core(c.tag, id))
    return
  end
  if not S.is_terminal(rec.state) then
    waiting.leave(c, id, rec)
    c:zrem(K.index(c.tag, 'execution_deadline'), id)
  end
  if rec.subflow then subflows.delete(c, rec) end
  purging.delete(c, id, rec)
end

local function forget_poison(c, flow_id)
  local key = K.index(c.tag, 'cascade_poison')
  if server.call('EXISTS', key) == 0 then return end
  local page = server.call('HSCAN', key, '0', 'MATCH', '?|' .. flow_id .. '|*', 'COUNT', POISON)
  for i = 1, #page[2], 2 do server.call('HDEL', key, page[2][i]) end
end

-- Deletes members of a flow that is marked for deletion, then the flow; true once all is deleted.
function flow_purging.step(c, flow_id)
  local ids = server.call('ZRANGE', K.members(c.tag, flow_id), 0, MEMBERS - 1)
  for _, id in ipairs(ids) do delete(c, flow_id, id) end
  if #ids == MEMBERS then return false end
  forget_poison(c, flow_id)
  for _, kind in ipairs({ 'h', 'f' }) do subflows.forget_failures(c, kind .. '|' .. flow_id) end
  server.call('UNLINK', K.flow(c.tag, flow_id), K.flow_tags(c.tag, flow_id),
    K.edges(c.tag, flow_id), K.held(c.tag, flow_id), K.members(c.tag, flow_id),
    K.member_ids(c.tag, flow_id), K.exits(c.tag, flow_id))
  for _, name in ipairs({ 'flow_index', 'flow_due', 'cancel_backlog', 'release_backlog' }) do
    server.call('ZREM', K.index(c.tag, name), flow_id)
  end
  server.call('HDEL', K.index(c.tag, 'replay_backlog'), flow_id)
  c.flows[flow_id] = false
  return true
end

-- The existing record of a flow to create, or nil. A flow whose deletion has begun is deleted first;
-- the error if that takes more than one call, which a repeat continues.
function flow_purging.replaceable(c, flow_id)
  local f = flow.read(c, flow_id)
  if not f or not f.deleting then return f end
  if not flow_purging.step(c, flow_id) then reply.refuse('execution_being_deleted') end
end

-- Why a flow may not be deleted yet, or nil.
function flow_purging.problem(f)
  local live = flow.number(f, 'live')
  if live > 0 then
    return reply.err('flow_not_terminal', 'unfinished members: ' .. values.text(live))
  end
  if not f.finished_at and not flow.is_cancelled(f) then
    return reply.err('flow_not_terminal', 'it has no members and is not cancelled')
  end
end
