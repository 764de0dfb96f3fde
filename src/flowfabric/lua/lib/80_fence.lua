-- Proof of ownership. A fence is `<lease_id>/<epoch>/<attempt_id>/<attempt_index>`; missing parts
-- are empty.

function fence.parse(text)
  local lease_id, epoch, attempt_id, index =
    string.match(text, '^([^/]*)/([^/]*)/([^/]*)/([^/]*)$')
  return { lease_id = lease_id or '', epoch = epoch or '', attempt_id = attempt_id or '',
    index = index or '' }
end

-- The error if there is no live lease, or nil; with `marks`, marks a lapsed lease as expired.
function fence.lease_problem(c, id, rec, marks)
  if not S.is_active(rec.state) then return reply.not_active(rec) end
  if S.is_lease_revoked(rec.state) then return reply.err('lease_revoked') end
  if S.is_lease_expired(rec.state) or tonumber(rec.lease_expires_at) <= c.now then
    if marks then lease.mark_expired(c, id, rec) end
    return reply.err('lease_expired')
  end
end

function fence.mismatch(rec, given)
  if given.lease_id ~= record.lease_id(rec) or tonumber(given.epoch) ~= record.epoch(rec)
      or (given.attempt_id ~= '' and given.attempt_id ~= record.attempt_id(rec))
      or (given.index ~= '' and tonumber(given.index) ~= record.attempt_index(rec)) then
    return reply.err('stale_lease')
  end
end

-- Checks 2 to 6 of the fence order: nil if the caller holds the lease, otherwise the error.
function fence.check(c, id, rec, text, override, marks)
  if rec.state == S.ACTIVE and text == rec.lease .. '/' .. rec.attempt
      and tonumber(rec.lease_expires_at) > c.now then
    return nil
  end
  local given = fence.parse(text)
  local set = (given.lease_id ~= '' and 1 or 0) + (given.epoch ~= '' and 1 or 0)
    + (given.attempt_id ~= '' and 1 or 0)
  if set == 0 then
    if not override then return reply.err('fence_required') end
  elseif set < 3 then
    return reply.err('partial_fence_triple')
  end
  return fence.lease_problem(c, id, rec, marks) or (set == 3 and fence.mismatch(rec, given) or nil)
end

-- The index of the attempt that a lease of this epoch may have ended. Both only increase: an attempt
-- has at least one lease, and a resumed one has more.
local function index_at(c, id, rec, epoch)
  local last = record.attempt_index(rec)
  if not last or not epoch or record.epoch(rec) == epoch then return last end
  for index = math.min(last, epoch - 1), 0, -1 do
    local held = server.call('HGET', K.attempt(c.tag, id, index), 'lease')
    local reached = held and tonumber(string.sub(held, 38))
    if reached and reached <= epoch then return index end
  end
end

-- How the caller's attempt ended or paused; nil if the attempt is not the caller's.
function fence.own_attempt(c, id, rec, text)
  local given = fence.parse(text)
  if given.lease_id == '' or given.attempt_id == '' or given.epoch == '' then return nil end
  if given.index == '' then
    given.index = index_at(c, id, rec, tonumber(given.epoch))
    if not given.index then return nil end
  end
  local function mine(attempt, held)
    return attempt == given.attempt_id .. '/' .. given.index
      and held and string.sub(held, 38) == given.epoch
  end
  local archived = server.call('HMGET', K.attempt(c.tag, id, given.index),
    'attempt', 'lease', 'attempt_state', 'ended_by', 'delay_until', 'next_attempt_index', 'paused')
  if archived[1] then
    if not mine(archived[1], archived[2]) then return nil end
    return { state = archived[3], ended_by = archived[4], delay_until = archived[5],
      next_attempt_index = archived[6], paused = archived[7] }
  end
  if not mine(rec.attempt, rec.lease) then return nil end
  return { state = S.is_terminal(rec.state) and S.attempt_end(rec.state) or nil,
    ended_by = rec.ended_by, paused = rec.paused }
end
