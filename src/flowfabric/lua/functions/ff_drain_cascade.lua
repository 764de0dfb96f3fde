-- ff_drain_cascade: go on with what earlier calls left of ended members, decided joins, released
-- flows and failed units, as much as one call may.
-- Keys: cascade_backlog, pending_cancel_groups, release_backlog, reopen_backlog, replay_backlog,
--   cancel_backlog, subflow_outbox, subflow_parked, cascade_failed, cascade_poison, flow core, in,
--   out, and those of the transitions that it makes.
-- Arguments: retry (0: nothing | 1: what failed | 2: what was set aside, too).
-- Replies: resolved, promoted, skipped, cancelled, whether more is left (1 | 0), messages to other
--   partitions. Errors: none
--   (max_replays_exhausted, flow_already_terminal, deps_not_satisfied, execution_not_terminal: the
--   member stays as it is).
-- Events: completion, replayed, flow_finished.
local AT_ONCE = 50

local function parts(name)
  return string.match(name, '^([^|]+)|(.+)$')
end

local function drain_ended(c)
  local backlog, work = K.index(c.tag, 'cascade_backlog'), {}
  for _, name in ipairs(server.call('ZRANGE', backlog, 0, AT_ONCE - 1)) do
    local flow_id, uuid = parts(name)
    local id = uuid and edges.id_of(c, uuid)
    local ok, rec = try(function() return id and record.read(c, id) end)
    if ok and rec and rec.flow_id == flow_id and S.is_terminal(rec.state) then
      work[#work + 1] = { id = id, rec = rec, marked = true }
    else
      server.call('ZREM', backlog, name)
    end
  end
  if #work > 0 then cascade.run(c, work) end
end

local function drain_siblings(c)
  local key = K.index(c.tag, 'pending_cancel_groups')
  for _, name in ipairs(server.call('SRANDMEMBER', key, AT_ONCE)) do
    if cascade.room(c) <= 0 then return end
    local flow_id, uuid = parts(name)
    local id = uuid and edges.id_of(c, uuid)
    local ok, done = try(function()
      local rec = id and record.read(c, id)
      if not rec or rec.flow_id ~= flow_id or not rec.siblings then return true end
      return cascade.cancel_siblings(c, id, rec)
    end)
    if not ok or done then server.call('SREM', key, name) end
  end
end

local function drain_reopened(c)
  local backlog = K.index(c.tag, 'reopen_backlog')
  for _, name in ipairs(server.call('HRANDFIELD', backlog, AT_ONCE)) do
    if cascade.room(c) <= 0 then return end
    local all, flow_id, uuid = string.match(name, '^(%l)|([^|]+)|(.+)$')
    local id = uuid and edges.id_of(c, uuid)
    local ok, rec = try(function() return id and record.read(c, id) end)
    if ok and rec and rec.flow_id == flow_id then
      replaying.reopen(c, { { id = id, rec = rec, from = server.call('HGET', backlog, name) } },
        all == 'a')
    else
      server.call('HDEL', backlog, name)
    end
  end
end

-- The record of a flow, or nil if there is none that can be read.
local function readable(c, flow_id)
  local ok, f = try(flow.read, c, flow_id)
  return ok and f or nil
end

local function drain_replayed(c)
  local backlog = K.index(c.tag, 'replay_backlog')
  for _, flow_id in ipairs(server.call('HRANDFIELD', backlog, AT_ONCE)) do
    if cascade.room(c) <= 0 then return end
    local which, from = string.match(server.call('HGET', backlog, flow_id), '^(%l) (%d+)$')
    local f = readable(c, flow_id)
    if not which or not f or which ~= 'n' and flow.is_cancelled(f) then
      server.call('HDEL', backlog, flow_id)
    elseif which ~= 'n' then
      replaying.flow(c, flow_id, from, which)
    elseif subflows.revive(c, flow_id) then
      replaying.flow(c, flow_id, from, 'w')
    end
  end
end

local function drain_released(c)
  local backlog = K.index(c.tag, 'release_backlog')
  for _, flow_id in ipairs(server.call('ZRANGE', backlog, 0, AT_ONCE - 1)) do
    if cascade.room(c) <= 0 then return end
    if readable(c, flow_id) then
      flow.release(c, flow_id)
    else
      server.call('ZREM', backlog, flow_id)
    end
  end
end

-- Flows that were cancelled with the member that owns them; others wait for their grace.
local function drain_cancelled(c)
  local backlog = K.index(c.tag, 'cancel_backlog')
  local due = server.call('ZRANGE', backlog, '-inf', c.now, 'BYSCORE', 'LIMIT', 0, AT_ONCE)
  for _, flow_id in ipairs(due) do
    if cascade.room(c) <= 0 then return true end
    if readable(c, flow_id) then
      local cancelled, _, left = flow_cancel.drain(c, flow_id)
      cascade.counts(c).cancelled = cascade.counts(c).cancelled + cancelled
      if left > 0 then return true end
    else
      server.call('ZREM', backlog, flow_id)
    end
  end
end

local function retry_failed(c)
  local key = K.index(c.tag, 'cascade_failed')
  for _, entry in ipairs(server.call('HRANDFIELD', key, AT_ONCE)) do
    if cascade.room(c) <= 0 then return end
    cascade.retry(c, entry)
  end
end

-- Has what was set aside tried again.
local function unpark(c)
  local poison, parked = K.index(c.tag, 'cascade_poison'), K.index(c.tag, 'subflow_parked')
  for _, entry in ipairs(server.call('HRANDFIELD', poison, AT_ONCE)) do
    if string.sub(entry, 1, 2) ~= 'm|' then
      server.call('HSET', K.index(c.tag, 'cascade_failed'), entry, '0')
    end
    server.call('HDEL', poison, entry)
  end
  for _, name in ipairs(server.call('HRANDFIELD', parked, AT_ONCE)) do
    -- A newer message of that name comes first.
    server.call('HSETNX', K.index(c.tag, 'subflow_outbox'), name, server.call('HGET', parked, name))
    server.call('HDEL', parked, name)
  end
end

register('ff_drain_cascade', function(keys, args)
  local c = Context.open(keys[1], true)
  if args[1] == '2' then unpark(c) end
  drain_ended(c)
  drain_siblings(c)
  drain_reopened(c)
  drain_replayed(c)
  drain_released(c)
  local owes = drain_cancelled(c)
  if args[1] ~= '0' then retry_failed(c) end
  c:close()
  local left = server.call('EXISTS', K.index(c.tag, 'cascade_backlog'),
    K.index(c.tag, 'pending_cancel_groups'), K.index(c.tag, 'release_backlog'),
    K.index(c.tag, 'reopen_backlog'), K.index(c.tag, 'replay_backlog'))
  local done = cascade.counts(c)
  return reply.ok(done.resolved, done.promoted, done.skipped, done.cancelled,
    (owes or left > 0) and 1 or 0, server.call('HLEN', K.index(c.tag, 'subflow_outbox')))
end, { 'allow-oom' })
