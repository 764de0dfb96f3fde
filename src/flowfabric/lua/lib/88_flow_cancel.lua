-- Cancelling a flow: marking it, then cancelling its members in order, a limited number per call.

local PAGE = 64
local STRENGTH = { flow_only = 1, cancel_pending = 2, cancel_all = 3 }
local PENDING = { 'waiting', 'delayed', 'rate_limited', 'waiting_children' }

function flow_cancel.strength(policy) return STRENGTH[policy] or 1 end

-- Cancels a member if the flow's policy includes it: `cancelled`, or `settled` if there is nothing to
-- do.
function flow_cancel.member(c, flow_id, id)
  local f, rec = flow.read(c, flow_id), record.checked_lease(c, id)
  if not f or not rec or S.is_terminal(rec.state) then return 'settled' end
  local child, policy = rec.subflow, f.cancellation_policy
  if policy ~= 'cancel_all' and child then
    subflows.cancel(c, rec, policy, f.cancel_reason)
    -- A running subflow may finish, like a running attempt.
    if rec.subflow_open then return 'settled' end
    -- A subflow without a running member finishes at once, which ends the member.
    record.reload_state(c, id, rec)
    if S.is_terminal(rec.state) then return 'cancelled' end
  end
  if not flow.ends_members(f) then return 'settled' end
  if policy == 'cancel_pending' then
    -- A running attempt may finish, even one that has just been resumed.
    local continues = S.is_eligible(rec.state) and S.has_paused_attempt(rec.state)
    if not S.is_runnable(rec.state) or continues then return 'settled' end
  end
  ending.cancel(c, id, rec, 'flow_cascade', f.cancel_reason)
  return 'cancelled'
end

-- How many members the drain still has to handle.
function flow_cancel.owed(f)
  if not flow.ends_members(f) then return 0 end
  if f.cancellation_policy == 'cancel_all' then return flow.number(f, 'live') end
  local count = 0
  for _, state in ipairs(PENDING) do count = count + flow.number(f, 'members_' .. state) end
  return count
end

-- Cancels members, within the limit of the call; returns how many were cancelled, how many needed
-- nothing, and how many are left.
function flow_cancel.drain(c, flow_id)
  local f, key = flow.read(c, flow_id), K.members(c.tag, flow_id)
  local from, cancelled, settled, last = f.cancelled_upto or '0', 0, 0, false
  while not last and cascade.room(c) > 0 do
    local limit = math.min(PAGE, cascade.room(c))
    local page = server.call('ZRANGE', key, '(' .. from, '+inf', 'BYSCORE', 'LIMIT', 0, limit,
      'WITHSCORES')
    for i = 1, #page, 2 do
      local answer = cascade.cancel_member(c, flow_id, page[i])
      if answer == 'cancelled' then cancelled = cancelled + 1 end
      if answer == 'settled' then settled = settled + 1 end
      from = page[i + 1]
    end
    last = #page < 2 * limit
  end
  flow.settle(c)
  -- A policy that ends no members still has to reach every subflow.
  if last or (flow.ends_members(f) and flow_cancel.owed(f) == 0) then
    server.call('ZREM', K.index(c.tag, 'cancel_backlog'), flow_id)
    flow.clear(c, flow_id, 'cancelled_upto')
    return cancelled, settled, 0
  end
  flow.set(c, flow_id, 'cancelled_upto', from)
  cascade.counts(c).pending = 1
  return cancelled, settled, flow_cancel.owed(f)
end

-- Cancels the flow; members follow if the policy says so.
function flow_cancel.flip(c, flow_id, policy, reason, grace)
  local f = flow.read(c, flow_id)
  flow.set(c, flow_id, 'cancelled_at', f.cancelled_at or c.now, 'cancel_reason', reason,
    'cancellation_policy', policy, 'last_mutation_at', c.now)
  if f.cancelled_upto then flow.clear(c, flow_id, 'cancelled_upto') end
  events.emit_flow(c, 'flow_cancel_requested', flow_id, f, 'cp', policy, 'r', reason)
  if flow.number(f, 'kept') == 0 then flow.expect_deletion(c, flow_id, f) end
  if flow_cancel.strength(policy) == 1 and not f.subflows then return 0 end
  server.call('ZADD', K.index(c.tag, 'cancel_backlog'), c:after(grace), flow_id)
  local _, _, left = flow_cancel.drain(c, flow_id)
  return left
end
