-- Subflows. A member of kind `subflow` owns a flow and ends when that flow finishes; no worker ever
-- claims it. Its record has the flow (`subflow`: id, then the tag if it differs) and whether its own
-- dependencies are met (`subflow_open`). The flow's record has the member (`parent_execution_id`) and
-- whether the flow waits for it (`awaits_parent`). Across partitions, the two sides store messages in
-- `subflow_outbox` until they are delivered.

local MAX_DEPTH = 16
-- Limits of a joined result: with more exit nodes, or more bytes, the member has no result.
local MAX_EXITS, MAX_BYTES = 1000, 4194304

function subflows.is_node(rec) return rec.execution_kind == 'subflow' end

local function owned(rec)
  local flow_id, tag = string.match(rec.subflow or '', '^(%S+) ?(%S*)$')
  return flow_id, tag ~= '' and tag or nil
end

local OPPOSITE = { s = 'c', c = 's' }

-- Stores a message: a list of texts as JSON, a newline, and bytes. The time makes it unique. A
-- message to start replaces one to cancel, and vice versa.
local function post(c, kind, flow_id, parts, bytes)
  local key = K.index(c.tag, 'subflow_outbox')
  table.insert(parts, 1, values.text(c.now))
  server.call('HSET', key, kind .. '|' .. flow_id, cjson.encode(parts) .. '\n' .. (bytes or ''))
  if OPPOSITE[kind] then server.call('HDEL', key, OPPOSITE[kind] .. '|' .. flow_id) end
  cascade.counts(c).pending = 1
end

-- The name of a message among failed units.
local function unit_of(name)
  local kind, flow_id = string.match(name, '^(.-)|(.*)$')
  return 'm|' .. (flow_id or name) .. '|' .. (kind or '')
end

-- Clears failed deliveries of a message, and an older message of its name that was set aside.
function subflows.forget_failures(c, name)
  for _, index in ipairs({ 'cascade_failed', 'cascade_poison' }) do
    server.call('HDEL', K.index(c.tag, index), unit_of(name))
  end
  server.call('HDEL', K.index(c.tag, 'subflow_parked'), name)
end

-- Records that a message could not be delivered; after several failures it is set aside.
function subflows.note_failure(c, name, message, why)
  if not cascade.note_failure(c, unit_of(name), why) then return end
  server.call('HDEL', K.index(c.tag, 'subflow_outbox'), name)
  server.call('HSET', K.index(c.tag, 'subflow_parked'), name, message)
end

-- The member that a flow is submitted for, and the nesting depth of the flow; ends the call if the
-- member cannot own it.
function subflows.parent(c, id, flow_id, namespace)
  local rec = record.checked(c, id)
  local f = rec and rec.flow_id and flow.read(c, rec.flow_id)
  if not rec or f and not flow.is_shown(f) then reply.refuse('execution_not_found', id) end
  if not f or not subflows.is_node(rec) then
    reply.refuse('invalid_input', 'parent_execution_id: is not a member of kind subflow')
  end
  if flow.is_cancelled(f) then reply.refuse('flow_already_terminal', rec.flow_id) end
  if S.is_terminal(rec.state) then reply.refuse('terminal', id) end
  if rec.namespace ~= namespace then
    reply.refuse('invalid_input', 'namespace: the parent is in ' .. rec.namespace)
  end
  local other = owned(rec)
  if other and other ~= flow_id then
    reply.refuse('flow_submission_conflict', 'the parent owns the flow ' .. other)
  end
  local depth = flow.number(f, 'depth') + 1
  if depth > MAX_DEPTH then
    reply.refuse('invalid_input', 'parent_execution_id: subflows nest at most '
      .. MAX_DEPTH .. ' deep')
  end
  return rec, depth
end

-- Makes the member own the flow. `tag`: the flow's tag, if it differs.
function subflows.attach(c, id, rec, flow_id, tag)
  if rec.subflow then return end
  record.set(c, id, rec, 'subflow', tag and flow_id .. ' ' .. tag or flow_id)
  if rec.subflow_open then record.set(c, id, rec, 'blocking_detail', 'subflow') end
end

-- Starts a flow whose parent no longer waits for its dependencies.
function subflows.begin(c, flow_id)
  local f = flow.read(c, flow_id)
  if not f or not f.awaits_parent then return end
  flow.clear(c, flow_id, 'awaits_parent')
  -- A cancelled flow still runs its members if its policy does not end them.
  if not f.hold and not flow.ends_members(f) then flow.release(c, flow_id) end
end

-- Sends a message to a parent in another partition, to ask whether the submitted flow may run.
function subflows.ask_parent(c, flow_id, f)
  post(c, 'h', flow_id, { f.parent_execution_id, f.namespace })
end

-- Reruns a flow: `a`: what did not succeed; `w`: all of a finished flow; `n`: all of a cancelled
-- flow. The drain replays its members; the flow cannot finish before that is done.
function subflows.rerun(c, flow_id, which)
  local f = flow.read(c, flow_id)
  if not f or not flow.is_shown(f) then return false end
  if which ~= 'n' and flow.is_cancelled(f) then return false end
  if which == 'n' and not flow.is_cancelled(f) and not f.finished_at then
    -- The message to cancel never arrived.
    subflows.begin(c, flow_id)
    return true
  end
  flow.set(c, flow_id, 'replaying', '1')
  if f.finished_at then flow.clear(c, flow_id, 'finished_at') end
  server.call('HDEL', K.index(c.tag, 'subflow_outbox'), 'f|' .. flow_id)
  server.call('HSET', K.index(c.tag, 'replay_backlog'), flow_id, which .. ' 0')
  cascade.counts(c).pending = 1
  return true
end

-- Ends the cancellation of a flow that is rerun; false while members remain to be cancelled.
function subflows.revive(c, flow_id)
  local f = flow.read(c, flow_id)
  if not flow.is_cancelled(f) then return true end
  local owing = server.call('ZSCORE', K.index(c.tag, 'cancel_backlog'), flow_id)
  if owing and select(3, flow_cancel.drain(c, flow_id)) > 0 then return false end
  flow.clear(c, flow_id, 'cancelled_at', 'cancel_reason', 'cancellation_policy')
  flow.expect_deletion(c, flow_id, f)
  subflows.begin(c, flow_id)
  return true
end

-- From now on the member only waits for its flow.
function subflows.open(c, id, rec)
  if rec.subflow_open then return end
  record.set(c, id, rec, 'subflow_open', '1')
  local flow_id, tag = owned(rec)
  local again = rec.subflow_again
  record.clear(c, id, rec, 'subflow_again')
  if not flow_id then return end
  if tag then return post(c, 's', flow_id, { tag, id, again or '' }) end
  if not again then return subflows.begin(c, flow_id) end
  if not subflows.rerun(c, flow_id, again) then subflows.detach(c, id, rec) end
end

-- The flow was deleted, so that another one may take its place.
function subflows.detach(c, id, rec)
  record.clear(c, id, rec, 'subflow', 'subflow_again')
  if rec.subflow_open then record.set(c, id, rec, 'blocking_detail', 'no subflow') end
end

-- The state of a member whose dependencies are met, and why it waits.
function subflows.state(rec, attempt)
  return S.waiting_children(attempt), rec.subflow and 'subflow' or 'no subflow'
end

-- Cancels the flow of a member.
function subflows.cancel(c, rec, policy, reason)
  local flow_id, tag = owned(rec)
  if tag then return post(c, 'c', flow_id, { tag, policy, reason }) end
  local f = flow.read(c, flow_id)
  if not f or f.finished_at then return end
  local before = flow.is_cancelled(f) and flow_cancel.strength(f.cancellation_policy) or 0
  if flow_cancel.strength(policy) > before then
    flow_cancel.flip(c, flow_id, policy, reason, 0)
  end
end

-- Cancels the flow of a member that ended by itself.
function subflows.abandon(c, rec)
  if rec.flow_ended then return end
  subflows.cancel(c, rec, 'cancel_all',
    rec.cancellation_reason or 'parent_' .. S.outcome_name(rec.state))
end

-- The parent of a flow was deleted, so delete the flow once its members have ended.
function subflows.orphan(c, flow_id)
  local f = flow.read(c, flow_id)
  if not f or f.deleting then return end
  flow.set(c, flow_id, 'orphan', '1')
  -- Usually the flow had finished, or was cancelled when its parent ended.
  if flow.number(f, 'live') > 0 and not flow.ends_members(f) then
    flow_cancel.flip(c, flow_id, 'cancel_all', 'parent_deleted', 0)
  end
  flow.expect_deletion(c, flow_id, f)
end

-- Deletes the flow of a member that is deleted with its own flow.
function subflows.delete(c, rec)
  local flow_id, tag = owned(rec)
  for _, kind in ipairs({ 's', 'c' }) do subflows.forget_failures(c, kind .. '|' .. flow_id) end
  if tag then return post(c, 'd', flow_id, { tag }) end
  subflows.orphan(c, flow_id)
end

local AGAIN = { s = 'w', f = 'a' }

-- Reruns the flow of a replayed member: of a failed flow, only what did not succeed; any other flow
-- from its start.
function subflows.prepare_replay(c, id, rec)
  record.clear(c, id, rec, 'subflow_open')
  if rec.subflow then
    record.set(c, id, rec, 'subflow_again', AGAIN[S.outcome(rec.state)] or 'n')
  end
end

local function bin(bytes)
  local n = #bytes
  return string.char(0xc6, math.floor(n / 16777216), math.floor(n / 65536) % 256,
    math.floor(n / 256) % 256, n % 256) .. bytes
end

-- Results by key as one: a JSON object if all are JSON, or a msgpack map of bytes.
local function joined(found, all_json)
  local parts = {}
  for i, each in ipairs(found) do
    local empty = not each.result or all_json and each.result == ''
    if all_json then
      parts[i] = cjson.encode(each.key) .. ':' .. (empty and 'null' or each.result)
    else
      parts[i] = cmsgpack.pack(each.key) .. (empty and '\192' or bin(each.result))
    end
  end
  if all_json then return '{' .. table.concat(parts, ',') .. '}', 'json' end
  return string.char(0xde, math.floor(#found / 256), #found % 256) .. table.concat(parts), 'msgpack'
end

-- The results of the members without children, and their encoding: the bytes of a single one,
-- otherwise by key; nil if there are too many, or too many bytes.
local function results(c, flow_id)
  local ids = server.call('ZRANGE', K.exits(c.tag, flow_id), 0, MAX_EXITS)
  if #ids > MAX_EXITS then return nil end
  local found, all_json, bytes = {}, true, 0
  for _, id in ipairs(ids) do
    local rec = server.call('HMGET', K.core(c.tag, id), 'state', 'node', 'result_encoding', 'result')
    if rec[1] and S.is_success(rec[1]) then
      local result = record.result(c, id, { result = rec[4] }) or nil
      found[#found + 1] = { key = rec[2] or id, result = result, encoding = rec[3] or '' }
      all_json = all_json and (not result or rec[3] == 'json')
      bytes = bytes + (result and #result or 0)
    end
  end
  if bytes > MAX_BYTES or #found == 0 then return nil end
  if #ids == 1 then return found[1].result, found[1].encoding end
  return joined(found, all_json)
end

local function failure(flow_id, f)
  local counts = {}
  for _, state in ipairs({ 'failed', 'expired', 'cancelled', 'skipped' }) do
    local count = flow.number(f, 'members_' .. state)
    if count > 0 then counts[#counts + 1] = values.text(count) .. ' ' .. state end
  end
  return 'Subflow ' .. flow_id .. ' failed: ' .. table.concat(counts, ', ')
end

-- Ends a member with the outcome of its flow: completed, failed or cancelled; `gone` without a flow.
function subflows.finish_parent(c, id, flow_id, state, reason, encoding, result)
  local rec = record.checked(c, id)
  if not rec or S.is_terminal(rec.state) or owned(rec) ~= flow_id then return end
  -- The flow is about to run again, so this is its earlier outcome.
  if rec.subflow_again
      or server.call('HEXISTS', K.index(c.tag, 'subflow_outbox'), 's|' .. flow_id) == 1 then
    return
  end
  if state == 'gone' then return subflows.detach(c, id, rec) end
  rec.flow_ended = true
  if state == 'cancelled' then return ending.cancel(c, id, rec, 'flow_cascade', reason) end
  local fields = {}
  if state == 'failed' then
    values.append(fields, { 'failure_reason', reason, 'ended_by', 'subflow' })
    return ending.finish(c, id, rec, { outcome = 'f', reason = 'failed_terminal', fields = fields })
  end
  values.add(fields, 'result_encoding', encoding)
  ending.finish(c, id, rec, { outcome = 's', reason = 'completed', fields = fields, result = result })
end

-- Reports to its parent that a flow has finished.
function subflows.finished(c, flow_id, f, state)
  local id = f.parent_execution_id
  local reason, result, encoding = '', nil, nil
  if flow.ends_members(f) then
    state, reason = 'cancelled', f.cancel_reason
  elseif state == 'failed' then
    reason = failure(flow_id, f)
  else
    result, encoding = results(c, flow_id)
  end
  if string.sub(id, 1, #c.tag) ~= c.tag then
    return post(c, 'f', flow_id, { id, state, reason, encoding or '', result and '1' or '0' }, result)
  end
  subflows.finish_parent(c, id, flow_id, state, reason, encoding, result)
end
