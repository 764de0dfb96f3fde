-- Opening, marking and ending leases.

-- `stays`: the same execution gets another lease in this call.
function lease.leave_indexes(c, id, rec, stays)
  c:zrem(K.index(c.tag, 'lease_expiry'), id)
  c:zrem(K.lane(c.tag, rec.lane_id, 'active'), id)
  c:srem(K.worker_leases(c.tag, record.worker_instance(rec)), id)
  if rec.state ~= S.ACTIVE then
    local signature = waiting.signature(rec)
    c:zrem(K.reclaimable(c.tag, rec.lane_id, signature), id)
    c:release_signature(rec.lane_id, signature)
  end
  if rec.attempt_timeout_ms then c:zrem(K.index(c.tag, 'attempt_timeout'), id) end
  if rec.quota_policy_id or rec.held_budgets then admission.give_back(c, id, rec, stays) end
  lease.drop_grant(c, id, rec)
end

function lease.drop_grant(c, id, rec)
  if rec.grant_expires_at then
    server.call('DEL', K.grant(c.tag, id))
    record.clear(c, id, rec, 'grant_expires_at')
  end
end

-- Keeps lease, worker and timers for the reclaim and for operators.
function lease.mark_expired(c, id, rec)
  if rec.state ~= S.ACTIVE then return end
  record.transition(c, id, rec, S.EXPIRED, 'lease_expired_at', c.now,
    'last_transition_at', c.now, 'blocking_detail', 'lease expired, awaiting reclaim')
  lease.offer_for_reclaim(c, id, rec)
  streams.close(c, id, rec, 'lease_expired')
  events.emit_lease(c, 'expired', id, rec)
end

function lease.offer_for_reclaim(c, id, rec)
  c:zrem(K.index(c.tag, 'lease_expiry'), id)
  waiting.offer(c, id, rec, K.reclaimable)
  waiting.ring(c, rec)
end

local NONE = {}
local LINEAGE = { t = 'retry', p = 'replay' }

-- Fields of the record that describe waiting, a pause, or the previous attempt.
local WAITING_FIELDS = {
  'blocking_detail', 'delay_until', 'paused', 'suspended_at', 'attempt_timeout_remaining_ms',
  'lease_expired_at', 'lease_revoked_at', 'lease_revoke_reason', 'lease_last_renewed_at',
  'grant_expires_at', 'retry_at',
}
local ATTEMPT_FIELDS = {
  'progress_pct', 'progress_message', 'progress_updated_at', 'resumed_at',
  'pending_replay_reason', 'pending_replay_requested_by', 'retry_reason', 'replay_reason',
  'replay_requested_by', 'reclaim_reason', 'ended_by',
}

local function lineage(rec, mode)
  local kind = mode == 'reclaimed' and 'reclaim' or LINEAGE[S.attempt(rec.state)] or 'initial'
  local fields = { 'attempt_type', kind }
  if kind == 'initial' then return fields end
  values.add(fields, 'previous_attempt_index', record.attempt_index(rec))
  if kind == 'retry' then
    values.add(fields, 'retry_reason', rec.failure_reason)
  elseif kind == 'replay' then
    values.add(fields, 'replay_reason', rec.pending_replay_reason)
    values.add(fields, 'replay_requested_by', rec.pending_replay_requested_by)
  else
    values.append(fields, {
      'reclaim_reason', S.is_lease_revoked(rec.state) and 'lease_revoked' or 'lease_expired',
      'lease_reclaim_count', tonumber(rec.lease_reclaim_count or 0) + 1,
    })
  end
  return fields
end

-- Writes the new lease. `mode` is fresh, resumed or reclaimed. `grant` has the lease id and attempt
-- id as prefixes and a common suffix, the worker, the ttl, and the event's reason if there is one.
function lease.open(c, id, rec, mode, grant)
  local expires = values.text(c.now + grant.ttl)
  local old_epoch = record.epoch(rec)
  local timeout = tonumber(rec.attempt_timeout_ms or 0)
  local fields = NONE
  if mode == 'resumed' then
    timeout = tonumber(rec.attempt_timeout_remaining_ms or timeout)
  elseif not S.awaits_first_attempt(rec.state) then
    fields = lineage(rec, mode)
  end
  if rec.started_at or rec.last_transition_at or rec.grant_expires_at then
    record.clear(c, id, rec, unpack(WAITING_FIELDS))
    if mode ~= 'resumed' then record.clear(c, id, rec, unpack(ATTEMPT_FIELDS)) end
  end
  local attempt, started = rec.attempt, 'resumed_at'
  if mode ~= 'resumed' then
    attempt = grant.attempt_prefix .. grant.suffix .. '/' .. values.text(record.attempt_count(rec))
    started = rec.started_at and 'attempt_started_at' or 'started_at'
  end
  -- The start or resumption of the attempt is also the time of this transition.
  record.transition(c, id, rec, S.ACTIVE,
    'lease', grant.lease_prefix .. grant.suffix .. '/' .. values.text(old_epoch + 1),
    'attempt', attempt, 'worker', grant.worker, 'lease_expires_at', expires,
    started, values.text(c.now), unpack(fields))
  c:zadd(K.index(c.tag, 'lease_expiry'), expires, id)
  c:zadd(K.lane(c.tag, rec.lane_id, 'active'), expires, id)
  c:sadd(K.worker_leases(c.tag, record.worker_instance(rec)), id)
  if timeout > 0 then
    -- Not a field of the record; only part of the claim's reply.
    rec.time_left = math.max(1, timeout)
    c:zadd(K.index(c.tag, 'attempt_timeout'), c:after(rec.time_left), id)
  end
  if mode == 'reclaimed' then
    return events.emit_lease(c, 'reclaimed', id, rec, 'oe', old_epoch)
  end
  local details, kind = NONE, rec.attempt_type or 'initial'
  local reason = grant.reason or (mode == 'resumed' and 'claim_resumed')
  if reason or kind ~= 'initial' then
    details = { 'ty', kind }
    values.add(details, 'r', reason)
  end
  events.emit_lease(c, 'acquired', id, rec, unpack(details))
end
