-- Grants: short-lived permission for one worker to lease one execution.

local MAX_CAPABILITIES, MAX_CAPABILITY_BYTES = 256, 4096

function granting.capability_excess(csv)
  local _, commas = string.gsub(csv, ',', '')
  if commas >= MAX_CAPABILITIES then return 'too_many_tokens' end
  if #csv > MAX_CAPABILITY_BYTES then return 'too_many_bytes' end
end

function granting.lane_problem(rec, lane)
  if lane ~= '' and lane ~= rec.lane_id then
    return reply.err('invalid_input', 'lane_id: lane_mismatch: the execution is on ' .. rec.lane_id)
  end
end

-- Registers `handle(c, id, rec, args)` for claims and grants of one execution. Argument 2 is the
-- lane that the caller expects, or empty.
function granting.register_function(name, read, handle, flags)
  record.register_function(name, read, function(c, id, rec, args)
    return granting.lane_problem(rec, args[2]) or handle(c, id, rec, args)
  end, flags)
end

-- Limits and match of capabilities. A mismatch is stamped on the record. Argument 10 is what the
-- caller found wrong with its own list: other checks come first. Argument 11 has the tasks that the
-- worker knows, as tokens; they have no limit.
function granting.capability_problem(c, id, rec, args)
  local problem = granting.capability_excess(rec.required_capabilities or '')
  if problem then return reply.err('invalid_capabilities', 'required:' .. problem) end
  if args[10] ~= '' then return reply.err('invalid_capabilities', args[10]) end
  problem = granting.capability_excess(args[4])
  if problem then return reply.err('invalid_capabilities', 'worker:' .. problem) end
  local missing = offers.missing(waiting.required(rec),
    offers.of(args[4] .. ',' .. (args[11] or '')))
  if missing then
    server.call('HSET', K.core(c.tag, id), 'last_capability_mismatch_at', c.now)
    return reply.err('capability_mismatch', missing)
  end
end

function granting.live(c, rec) return tonumber(rec.grant_expires_at or 0) >= c.now end

-- A live grant is refused, unless this very call wrote it and its reply was lost.
function granting.repeated(c, id, rec, token)
  if not granting.live(c, rec) then return nil end
  local stored = server.call('HMGET', K.grant(c.tag, id), 'grant_token', 'grant_expires_at')
  if stored[1] == token then return reply.ok(tonumber(stored[2]), rec.lane_id) end
  return reply.err('grant_already_exists')
end

-- The texts after the token are for audits and decide nothing.
function granting.write(c, id, rec, args)
  local ttl, key = tonumber(args[5]), K.grant(c.tag, id)
  local worker_id, instance = string.match(args[3], '^(%S+) (%S+)$')
  local fields = {
    'worker_id', worker_id, 'worker_instance_id', instance, 'lane_id', rec.lane_id,
    'grant_token', args[6], 'created_at', c.now, 'grant_expires_at', c.now + ttl,
  }
  values.add(fields, 'capability_hash', args[7])
  values.add(fields, 'route_snapshot_json', args[8])
  values.add(fields, 'admission_summary', args[9])
  server.call('HSET', key, unpack(fields))
  server.call('PEXPIRE', key, ttl)
  record.set(c, id, rec, 'grant_expires_at', c.now + ttl)
  return reply.ok(c.now + ttl, rec.lane_id)
end

-- The error if the caller may not use the grant, or nil. An expired grant is removed.
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

-- The lease that an earlier, identical claim opened before its reply was lost.
function granting.replayed(c, id, rec, lease_id, attempt_id, mode)
  if rec.state == S.ACTIVE and tonumber(rec.lease_expires_at) > c.now
      and record.lease_id(rec) == lease_id
      and (attempt_id == '' or record.attempt_id(rec) == attempt_id) then
    return reply.ok(claiming.row(c, id, rec, mode), rec.lane_id)
  end
end

function granting.claim(c, id, rec, mode, grant)
  if claiming.ends_with_flow(c, id, rec, mode) then return reply.err('flow_already_terminal') end
  grant.suffix = ''
  claiming.take(c, id, rec, mode, grant)
  return reply.ok(claiming.row(c, id, rec, mode), rec.lane_id)
end
