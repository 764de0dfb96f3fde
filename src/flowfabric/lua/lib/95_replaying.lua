-- Running terminal executions again, and reopening the members that depend on them.

local DEFAULT_MAX_REPLAYS = 10
local PAGE = 64
-- How many executions an error names.
local MAX_NAMED = 100
-- The cost of rerunning a member, in resolved edges.
local UNITS = 4

-- The record has the last failure of any attempt; the archive only what ended this one.
local function ended_with(rec)
  if S.is_success(rec.state) then return nil end
  if S.is_cancelled(rec.state) then
    return { failure_reason = 'cancelled: ' .. (rec.cancellation_reason or '') }
  end
  return { failure_reason = rec.failure_reason, failure_category = rec.failure_category,
    ended_by = rec.ended_by }
end

-- Upstreams whose outcome does not satisfy a member's edges.
local function unmet(c, id, rec)
  local found = {}
  for _, line in ipairs(server.call('HVALS', K.into(c.tag, rec.flow_id, id))) do
    if edges.is_impossible(line) then
      found[#found + 1] = edges.id_of(c, edges.parse(id, line).upstream)
    end
  end
  table.sort(found)
  return found
end

-- Whether a member waits for its dependencies when it runs again: it was skipped, or ended while it
-- waited for them.
local function waits_again(id, rec)
  if not rec.flow_id or not rec.deps then return false end
  if S.is_skipped(rec.state) then return true end
  local ran = S.has_ended_attempt(rec.state) and not rec.between_attempts
  return not ran and edges.group(id, rec).state ~= 's'
end

-- The deleted ones among them, if the join can never be satisfied without them.
local function lost(c, id, rec, ended)
  local gone = {}
  for _, up_id in ipairs(ended) do
    if server.call('EXISTS', K.core(c.tag, up_id)) == 0 then gone[#gone + 1] = up_id end
  end
  local join = edges.join(rec)
  local staged = server.call('HLEN', K.into(c.tag, rec.flow_id, id))
  return staged - #gone < (join and join.k or staged) and gone or {}
end

-- The error if an execution may not run again, or nil.
function replaying.problem(c, id, rec, strict)
  if not S.is_terminal(rec.state) then return reply.err('execution_not_terminal') end
  local policy, readable = record.policy(c, id)
  if not readable then return reply.err('corruption', id .. ': policy: is not a JSON object') end
  local count = tonumber(rec.replay_count or 0)
  if count >= tonumber(policy.max_replay_count or DEFAULT_MAX_REPLAYS) then
    return reply.err('max_replays_exhausted')
  end
  local f = rec.flow_id and flow.read(c, rec.flow_id)
  if f and flow.is_cancelled(f) then return reply.err('flow_already_terminal') end
  if not waits_again(id, rec) then return nil end
  local ended = unmet(c, id, rec)
  local wanted = strict and ended or lost(c, id, rec, ended)
  if #wanted > 0 then return reply.err('deps_not_satisfied', unpack(wanted, 1, MAX_NAMED)) end
end

local function archive(c, id, rec)
  if not S.has_ended_attempt(rec.state)
      or server.call('EXISTS', K.attempt(c.tag, id, record.attempt_index(rec))) == 1 then
    return
  end
  local ended = rec.ended_by == 'reclaim_cap' and 'interrupted_reclaimed' or S.attempt_end(rec.state)
  record.archive(c, id, rec, ended, ended_with(rec))
end

-- The line of a reopened edge, and the edge.
local function opened_line(id, line)
  local e = edges.parse(id, line)
  e.state, e.resolved = 'u', ''
  return edges.format(e), e
end

local function comes_from(id, line, upstream)
  return string.find(line, upstream, 1, true) and edges.parse(id, line).upstream == upstream
end

-- Reopens edges of a member: the impossible ones, and those from `upstream`. They only accept a later
-- run of their upstream. Returns the counters, and the reopened edges.
local function open_edges(c, id, rec, upstream)
  local key, g, opened, lines = K.into(c.tag, rec.flow_id, id), edges.group(id, rec), {}, {}
  local flat = server.call('HGETALL', key)
  g.succeeded, g.failed, g.skipped, g.state = 0, 0, 0, 'p'
  for i = 1, #flat, 2 do
    local line = flat[i + 1]
    local counter = edges.counter(line)
    local good = counter == 'succeeded'
    if counter and (not good or upstream and comes_from(id, line, upstream)) then
      local text, e = opened_line(id, line)
      values.append(lines, { flat[i], text })
      opened[#opened + 1] = { flat[i], e }
    elseif counter then
      g[counter] = g[counter] + 1
    end
  end
  values.call('HSET', key, lines)
  cascade.spend(c, #opened)
  return g, opened
end

-- Whether the upstream of a reopened edge has ended again since.
local function has_ended_again(c, e)
  local up = server.call('HMGET', K.core(c.tag, edges.id_of(c, e.upstream)), 'state', 'replay_count')
  return up[1] and S.is_code(up[1]) and S.is_terminal(up[1])
    and tonumber(up[2] or 0) > tonumber(e.run)
end

-- Reruns a terminal execution; a member whose dependencies were never met waits for them. `how`:
-- reason, requested_by, keeps_steps; `upstream`: reopen only the edges from this one.
function replaying.run_again(c, id, rec, how, upstream)
  local policy = record.policy(c, id)
  local count, keeps_steps = tonumber(rec.replay_count or 0), how.keeps_steps
  cascade.spend(c, UNITS)
  local waits = upstream and rec.deps or waits_again(id, rec)
  local g, opened
  if waits then
    g, opened = open_edges(c, id, rec, upstream)
    g.state = edges.verdict(c, id, rec, g) or 'p'
    record.set(c, id, rec, 'deps', edges.group_text(g))
    record.clear(c, id, rec, 'decided_at', 'decided_by', 'siblings', 'sibling_scan')
  end
  archive(c, id, rec)
  if subflows.is_node(rec) then subflows.prepare_replay(c, id, rec) end
  if not rec.result then server.call('DEL', K.result(c.tag, id)) end
  if not keeps_steps then
    server.call('DEL', K.steps(c.tag, id))
    record.clear(c, id, rec, 'stepped')
  end
  record.clear(c, id, rec, 'completed_at', 'failure_reason', 'failure_category',
    'cancellation_reason', 'cancelled_by', 'result', 'result_encoding', 'ended_by', 'retry_count',
    'lease_reclaim_count', 'progress_pct', 'progress_message', 'progress_updated_at',
    'execution_deadline_at', 'paused', 'delay_until', 'pending_replay_reason',
    'pending_replay_requested_by', 'attempt_timeout_remaining_ms', 'suspended_at',
    'between_attempts', 'cascaded', 'kept_until', 'children_ended')
  local fields = { 'replay_count', values.text(count + 1), 'last_transition_at', c.now }
  -- Earlier answers belong to the earlier run, like its steps.
  if not keeps_steps and server.call('EXISTS', K.waitpoints(c.tag, id)) == 1 then
    values.add(fields, 'run_from', record.attempt_count(rec))
  end
  values.add(fields, 'pending_replay_reason', how.reason)
  values.add(fields, 'pending_replay_requested_by', how.requested_by)
  local lifetime = tonumber((policy.timeout_policy or {}).execution_deadline_ms or 0)
  if lifetime > 0 then
    values.add(fields, 'execution_deadline_at', c:after(lifetime))
    c:zadd(K.index(c.tag, 'execution_deadline'), c:after(lifetime), id)
  end
  c:zrem(K.lane(c.tag, rec.lane_id, 'terminal'), id)
  local blocked = waits and g.state ~= 's'
  local gated = rec.flow_id or subflows.is_node(rec)
  local state = (blocked or gated) and S.waiting_children('p') or S.eligible('p')
  record.transition(c, id, rec, state, unpack(fields))
  waiting.enter(c, id, rec)
  local details = { 'b', waits and 'skipped_flow_member' or 'normal', 'rc', count + 1 }
  values.add(details, 'by', how.requested_by)
  values.add(details, 'r', how.reason)
  events.emit(c, 'replayed', id, rec, unpack(details))
  if not blocked then
    -- The flow may be held.
    if gated then flow.move_on(c, id, rec) else waiting.ring(c, rec) end
  end
  if not waits then return end
  -- Even if the join is decided: another upstream may reopen it, and nothing else resolves these.
  for _, each in ipairs(opened) do
    local place, e = each[1], each[2]
    if has_ended_again(c, e) then graph.resolve_ended(c, rec.flow_id, place, id, e.upstream) end
  end
  record.reload_state(c, id, rec)
end

local HOW = { reason = 'upstream replayed', requested_by = '' }

-- Makes a child that another upstream has reopened also wait for the new run of this one.
local function reopen_more(c, id, rec, place, line)
  local blocked, g = S.is_blocked_by_dependencies(rec.state), edges.group(id, rec)
  if rec.subflow_open or not blocked and g.state ~= 's' then return end
  local counter, text, e = edges.counter(line), opened_line(id, line)
  server.call('HSET', K.into(c.tag, rec.flow_id, id), place, text)
  g[counter] = math.max(0, g[counter] - 1)
  g.state = edges.verdict(c, id, rec, g) or 'p'
  record.set(c, id, rec, 'deps', edges.group_text(g))
  if g.state == 'p' and not blocked then flow.block(c, id, rec) end
  if has_ended_again(c, e) then graph.resolve_ended(c, rec.flow_id, place, id, e.upstream) end
end

-- Reopens one child of a replayed member, if the child has ended; then returns its record. `run`: the
-- member's run; what that run has already decided stays valid.
local function reopen_child(c, id, upstream, all, place, run)
  local rec = record.checked(c, id)
  if not rec then return nil end
  local line = server.call('HGET', K.into(c.tag, rec.flow_id, id), place)
  local e = line and edges.parse(id, line)
  local decided = line and edges.counter(line)
  if not e or e.state == 'g' or e.upstream ~= upstream
      or decided and tonumber(e.run) >= run then
    return nil
  end
  if not S.is_terminal(rec.state) then
    if decided and (S.is_blocked_by_dependencies(rec.state) or S.awaits_replay(rec.state)) then
      reopen_more(c, id, rec, place, line)
    end
    return nil
  end
  if not (all or S.is_skipped(rec.state)) then return nil end
  if replaying.problem(c, id, rec) then return nil end
  replaying.run_again(c, id, rec, HOW, upstream)
  return rec
end

-- Reopens what depends on these members ({ id, rec }), within the limit of the call; the rest stays
-- in `reopen_backlog`. Returns how many were reopened.
function replaying.reopen(c, work, all)
  local i, count = 1, 0
  local backlog = K.index(c.tag, 'reopen_backlog')
  while work[i] do
    local each = work[i]
    local flow_id, from, done = each.rec.flow_id, each.from or '0', false
    local upstream, run = edges.uuid_of(each.id), tonumber(each.rec.replay_count or 0)
    local name = table.concat({ all and 'a' or 's', flow_id, upstream }, '|')
    while not done and cascade.room(c) > 0 do
      local limit = math.min(PAGE, cascade.room(c))
      local page = server.call('ZRANGE', K.out(c.tag, flow_id, each.id), '(' .. from, '+inf',
        'BYSCORE', 'LIMIT', 0, limit, 'WITHSCORES')
      for n = 1, #page, 2 do
        -- One unit may need the room of many.
        if cascade.room(c) <= 0 then break end
        local child, place = edges.noted(c, page[n])
        local rec = cascade.unit(c, { all and 'R' or 'r', flow_id, upstream,
          edges.uuid_of(child) }, reopen_child, child, upstream, all, place, run)
        if rec then
          count = count + 1
          if rec.out then work[#work + 1] = { id = child, rec = rec } end
        end
        from = page[n + 1]
      end
      done = #page < 2 * limit and (#page == 0 or from == page[#page])
    end
    if done then
      server.call('HDEL', backlog, name)
    else
      server.call('HSET', backlog, name, from)
      cascade.counts(c).pending = 1
    end
    i = i + 1
  end
  return count
end

local ENDED = {
  f = { f = true, x = true },
  a = { f = true, x = true, c = true },
  w = { s = true, f = true, x = true, c = true, k = true },
}
local PREFIX = { f = 'p', a = 'P', w = 'w' }
local BY_FLOW = { reason = 'flow replayed', requested_by = '' }

-- Replays one member of a flow, if `which` includes it; true if it did.
function replaying.member(c, id, which)
  local rec = record.checked(c, id)
  local ended = rec and S.is_terminal(rec.state) and S.outcome(rec.state)
  if not ended or not ENDED[which][ended] or which == 'w' and rec.deps then return false end
  if replaying.problem(c, id, rec) then return false end
  replaying.run_again(c, id, rec, BY_FLOW)
  return true, rec
end

-- Replays members of a flow and reopens what was skipped after them: `f`: those that failed; `a`:
-- those that ended without success; `w`: the whole flow from its roots. Works within the limit of the
-- call; the rest stays in `replay_backlog`. Returns how many were replayed and reopened, and whether
-- some are left.
function replaying.flow(c, flow_id, from, which)
  local key, backlog = K.members(c.tag, flow_id), K.index(c.tag, 'replay_backlog')
  local replayed, reopened, last = 0, 0, false
  while not last and cascade.room(c) > 0 do
    local limit = math.min(PAGE, cascade.room(c))
    local page = server.call('ZRANGE', key, '(' .. from, '+inf', 'BYSCORE', 'LIMIT', 0, limit,
      'WITHSCORES')
    for i = 1, #page, 2 do
      if cascade.room(c) <= 0 then break end
      local id, rec = page[i], nil
      local name = { PREFIX[which], flow_id, edges.uuid_of(id) }
      local done = cascade.unit(c, name, function()
        local again
        again, rec = replaying.member(c, id, which)
        return again
      end)
      if done then replayed = replayed + 1 end
      if rec and rec.out then
        reopened = reopened + replaying.reopen(c, { { id = id, rec = rec } }, which == 'w')
      end
      from = page[i + 1]
    end
    last = #page < 2 * limit and (#page == 0 or from == page[#page])
  end
  if last then
    server.call('HDEL', backlog, flow_id)
    if flow.read(c, flow_id).replaying then
      -- If no member runs again, the flow has finished once more.
      flow.clear(c, flow_id, 'replaying')
      flow.tally(c, flow_id)
    end
  else
    server.call('HSET', backlog, flow_id, which .. ' ' .. from)
    cascade.counts(c).pending = 1
  end
  return replayed, reopened, not last
end
