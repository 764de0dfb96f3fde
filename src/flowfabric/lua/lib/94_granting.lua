-- Short-lived permission for one worker to turn one execution into a lease.

local MAX_CAPABILITIES = 256
local MAX_CAPABILITY_BYTES = 4096

local function over_limit(csv)
  local count = 0
  for _ in string.gmatch(csv, '[^,]+') do count = count + 1 end
  if count > MAX_CAPABILITIES then return 'too_many_tokens' end
  if #csv > MAX_CAPABILITY_BYTES then return 'too_many_bytes' end
end

-- Capability limits and match; a mismatch is stamped on the record, nothing moves. `refused`
-- is what the caller found wrong with its own list: other checks come before it.
function granting.capability_problem(c, id, rec, csv, refused)
  local problem = over_limit(rec.required_capabilities or '')
  if problem then return reply.err('invalid_capabilities', 'required:' .. problem) end
  if refused ~= '' then return reply.err('invalid_capabilities', refused) end
  problem = over_limit(csv)
  if problem then return reply.err('invalid_capabilities', 'worker:' .. problem) end
  local missing = claiming.missing(rec.required_capabilities, claiming.offered(csv))
  if missing then
    server.call('HSET', K.core(c.tag, id), 'last_capability_mismatch_at', c.now)
    return reply.err('capability_mismatch', missing)
  end
end

function granting.live(c, rec) return tonumber(rec.grant_expires_at or 0) >= c.now end

-- A live grant is refused, unless this very call wrote it and its reply was lost.
function granting.repeated(c, id, rec, token)
  local stored = server.call('HMGET', K.grant(c.tag, id), 'grant_token', 'grant_expires_at')
  if stored[1] == token then return reply.ok(tonumber(stored[2]), rec.lane_id) end
  return reply.err('grant_already_exists')
end

-- want: worker (`id instance`), token, ttl, and audit texts that decide nothing.
function granting.write(c, id, rec, want)
  local expires = c.now + want.ttl
  local key = K.grant(c.tag, id)
  local worker_id, instance = string.match(want.worker, '^(%S+) (%S+)$')
  local args = {
    'HSET', key, 'worker_id', worker_id, 'worker_instance_id', instance, 'lane_id', rec.lane_id,
    'grant_token', want.token, 'created_at', c.now, 'grant_expires_at', expires,
  }
  for _, name in ipairs({ 'capability_hash', 'route_snapshot_json', 'admission_summary' }) do
    if want[name] ~= '' then
      args[#args + 1] = name
      args[#args + 1] = want[name]
    end
  end
  server.call('DEL', key)
  server.call(unpack(args))
  server.call('PEXPIRE', key, want.ttl)
  server.call('HSET', K.core(c.tag, id), 'grant_expires_at', expires)
  return expires
end

-- nil when the caller may use the grant, else the error. A stale one is removed.
function granting.refusal(c, id, rec, worker, token)
  local stored = server.call('HMGET', K.grant(c.tag, id),
    'worker_id', 'grant_token', 'grant_expires_at')
  if not stored[1] or stored[1] ~= string.match(worker, '^%S+')
      or not values.equal(stored[2] or '', token) then
    return reply.err('invalid_claim_grant')
  end
  if tonumber(stored[3]) < c.now then
    lease.drop_grant(c, id, rec)
    return reply.err('claim_grant_expired')
  end
end

-- The lease that an earlier, identical claim opened, when its reply was lost.
function granting.replayed(c, id, rec, lease_id, attempt_id, mode)
  if rec.state == S.ACTIVE and tonumber(rec.lease_expires_at) > c.now
      and record.lease_id(rec) == lease_id
      and (attempt_id == '' or record.attempt_id(rec) == attempt_id) then
    return reply.ok(claiming.row(c, id, rec, mode), rec.lane_id)
  end
end

function granting.lane_problem(rec, lane)
  if lane ~= '' and lane ~= rec.lane_id then
    return reply.err('invalid_input', 'lane_id: lane_mismatch: the execution is on ' .. rec.lane_id)
  end
end
