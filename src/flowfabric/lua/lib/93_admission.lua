-- Admission: what executions need before a claim, what they give back after a run, and blocking.

-- The letters of the eligibility and of the blocking reason, by reason.
local CAUSES = {
  waiting_for_budget = 'bu', waiting_for_quota = 'qq', waiting_for_capable_worker = 'rg',
  paused_by_operator = 'oo', paused_by_policy = 'lp',
}
local OPERATOR = 'o'

local function of_event(detail)
  return unpack(detail and detail ~= '' and { 'rd', detail } or {})
end

-- The time of `<ms>`, or `+<ms>` from now.
local function moment(c, text)
  local ahead = string.match(text, '^%+(%d+)$')
  return ahead and values.text(c:after(tonumber(ahead))) or text
end

-- Blocks an execution that could be claimed now; returns the error or nil. `retry_at`: when the cause is
-- expected to end, or empty.
function admission.block(c, id, rec, reason, detail, retry_at)
  if S.is_terminal(rec.state) then return reply.not_active(rec) end
  if not S.is_runnable(rec.state) then return reply.err('execution_not_eligible') end
  local cause = CAUSES[reason]
  if not cause then return reply.err('invalid_blocking_reason', reason) end
  if not S.is_eligible(rec.state) or granting.live(c, rec) then
    return reply.err('execution_not_eligible')
  end
  waiting.leave(c, id, rec)
  local fields = { 'last_transition_at', values.text(c.now) }
  record.add_or_clear(c, id, rec, fields, 'blocking_detail', detail)
  values.add(fields, 'retry_at', moment(c, retry_at))
  record.transition(c, id, rec, S.blocked(cause, S.attempt(rec.state)), unpack(fields))
  waiting.enter(c, id, rec)
  if reason == 'paused_by_operator' then
    events.emit(c, 'operator_blocked', id, rec, of_event(detail))
  end
end

-- Unblocks an execution; returns the error, or nil and its new public state. `expected`: the reason
-- that it must be blocked for, or empty. Only the flow itself releases a member that it holds.
function admission.unblock(c, id, rec, expected)
  local reason = S.blocking(rec.state)
  if not S.is_blocked(rec.state)
      or (expected ~= '' and reason ~= string.sub(CAUSES[expected] or '', 2))
      or (reason == OPERATOR and rec.flow_id and flow.holds(c, id, rec)) then
    return reply.err('execution_not_eligible')
  end
  local f = flow.ending_member(c, rec, flow.resumes(c, rec))
  if f then
    ending.cancel(c, id, rec, 'flow_cascade', f.cancel_reason)
    return nil, 'cancelled'
  end
  waiting.leave(c, id, rec)
  local detail = rec.blocking_detail
  record.transition(c, id, rec, S.eligible(S.attempt(rec.state)),
    'last_transition_at', values.text(c.now))
  record.clear(c, id, rec, 'blocking_detail', 'retry_at')
  waiting.enter(c, id, rec)
  waiting.ring(c, rec)
  if reason == OPERATOR then events.emit(c, 'operator_unblocked', id, rec, of_event(detail)) end
  return nil, 'waiting'
end

-- Budgets and quotas are on other partitions: the scheduler asks them before it claims, and what runs
-- leave behind for them is owed here until it is delivered (`returns`, by time). An entry is
-- `q|<policy>|<run>|<execution>` for the slot of this run, `b|<budget>|<epoch>|<execution>` for what
-- the leases up to this epoch hold, or `nq` and `nb` (with 0) for the note there that it waits.
local MAX_BUDGETS = 16
local UUID = '^%x%x%x%x%x%x%x%x%-%x%x%x%x%-%x%x%x%x%-%x%x%x%x%-%x%x%x%x%x%x%x%x%x%x%x%x$'

local function is_uuid(value) return type(value) == 'string' and string.find(value, UUID) ~= nil end

local function malformed(field, why)
  return nil, nil, reply.err('invalid_policy_json', field .. ': ' .. why)
end

-- The budgets that a policy names, as CSV without duplicates, and its quota policy; or the error.
function admission.attached(policy)
  local ids, quota_policy = policy.budget_ids, policy.quota_policy_id
  if quota_policy ~= nil and not is_uuid(quota_policy) then
    return malformed('quota_policy_id', 'is not a UUID')
  end
  if ids == nil then return nil, quota_policy end
  if type(ids) ~= 'table' then return malformed('budget_ids', 'must be a list') end
  if #ids > MAX_BUDGETS then return malformed('budget_ids', 'must hold at most ' .. MAX_BUDGETS) end
  local seen, list = {}, {}
  for i, id in ipairs(ids) do
    if not is_uuid(id) then return malformed('budget_ids[' .. (i - 1) .. ']', 'is not a UUID') end
    if not seen[id] then list[#list + 1], seen[id] = id, true end
  end
  return #list > 0 and table.concat(list, ',') or nil, quota_policy
end

function admission.is_needed(rec) return rec.budget_ids or rec.quota_policy_id end

-- The number of the latest run. Every lease and every replay raises it: a run that is admitted after
-- something was given back has a higher number, also where a grant was given back unused.
function admission.run(rec) return record.epoch(rec) + tonumber(rec.replay_count or 0) end

-- Whether a candidate needs admission before it is claimed; notes it for the reply, where it takes
-- the place of a claim. A reclaim needs none: the run goes on.
function admission.defers(c, want, id, rec)
  if want.admitted or not admission.is_needed(rec) then return false end
  local needing = want.needing or {}
  want.needing, want.noted = needing, want.noted or {}
  if not want.noted[id] then
    want.noted[id], want.max = true, want.max - 1
    needing[#needing + 1] = {
      id, rec.budget_ids or false, rec.quota_policy_id or false, values.text(tonumber(c:score(rec))),
      admission.run(rec) + 1,
    }
  end
  return true
end

local owed, owing = nil, {}

local function owe(c, entry)
  c:zadd(K.index(c.tag, 'returns'), values.text(c.now), entry)
  if not owing[c.tag] then owed, owing[c.tag] = (owed or 'RETURNS') .. ' ' .. c.tag, true end
end

-- `RETURNS` and the partitions for which this call wrote entries, or nil.
function admission.owed_in()
  if not owed then return nil end
  local text = owed
  owed, owing = nil, {}
  return text
end

-- Notes what a run that ends or pauses gives back; `stays`: another lease follows, so only what the
-- lease held.
function admission.give_back(c, id, rec, stays)
  if rec.held_budgets then
    local rest = '|' .. values.text(record.epoch(rec)) .. '|' .. id
    for budget in string.gmatch(rec.held_budgets, '[^,]+') do owe(c, 'b|' .. budget .. rest) end
    record.clear(c, id, rec, 'held_budgets')
  end
  if rec.quota_policy_id and not stays then
    admission.give_back_slot(c, id, rec, admission.run(rec))
  end
end

-- Removes the notes at the limits that a blocked execution waits for, because it ends.
function admission.forget_waiting(c, id, rec)
  if S.is_blocked_by_budget(rec.state) then
    for budget in string.gmatch(rec.budget_ids or '', '[^,]+') do owe(c, 'nb|' .. budget .. '|0|' .. id) end
  elseif rec.quota_policy_id and S.is_blocked_by_quota(rec.state) then
    owe(c, 'nq|' .. rec.quota_policy_id .. '|0|' .. id)
  end
end

function admission.give_back_slot(c, id, rec, run)
  owe(c, 'q|' .. rec.quota_policy_id .. '|' .. values.text(run) .. '|' .. id)
end
