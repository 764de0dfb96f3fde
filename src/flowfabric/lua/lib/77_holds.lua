-- What executions hold of a budget: a reservation counts until it is settled, given back, or lost
-- with its lease. A hold is an entry of `holds` (by reservation), `holders` (`<execution> <id>`, in
-- order of names) and `hold_expiry` (by time); `reserved` has the sum per dimension.

local GRACE_MS = 30000

local function member(hold) return hold.execution_id .. ' ' .. hold.id end

function budgets.hold(b, reservation_id)
  local packed = server.call('HGET', budgets.part(b, 'holds'), reservation_id)
  if not packed then return nil end
  local execution_id, epoch, expires_at, latest, deltas, answer = unpack(cmsgpack.unpack(packed))
  return { id = reservation_id, execution_id = execution_id, epoch = epoch,
    expires_at = expires_at, latest = latest, deltas = deltas, answer = answer }
end

-- When a hold ends: some time after its lease, or when its own time is over.
function budgets.hold_end(hold, lease_expires_at)
  return math.min(clock.after(lease_expires_at, GRACE_MS), hold.latest)
end

function budgets.store_hold(b, hold)
  server.call('HSET', budgets.part(b, 'holds'), hold.id, cmsgpack.pack({ hold.execution_id,
    hold.epoch, hold.expires_at, hold.latest, hold.deltas, hold.answer }))
  server.call('ZADD', budgets.part(b, 'holders'), 0, member(hold))
  server.call('ZADD', budgets.part(b, 'hold_expiry'), values.text(hold.expires_at), hold.id)
end

-- Removes a hold; what it held is free again.
function budgets.drop_hold(b, hold, reserved)
  for name, held in pairs(hold.deltas) do
    local left = (reserved[name] or 0) - held
    reserved[name] = left > 0 and left or nil
    if left > 0 then
      server.call('HSET', budgets.part(b, 'reserved'), name, values.text(left))
    else
      server.call('HDEL', budgets.part(b, 'reserved'), name)
    end
  end
  server.call('HDEL', budgets.part(b, 'holds'), hold.id)
  server.call('ZREM', budgets.part(b, 'holders'), member(hold))
  server.call('ZREM', budgets.part(b, 'hold_expiry'), hold.id)
end

-- The holds of an execution under leases up to this epoch.
function budgets.holds_of(b, execution_id, epoch)
  local found = {}
  local prefix = execution_id .. ' '
  for _, name in ipairs(server.call('ZRANGE', budgets.part(b, 'holders'), '[' .. prefix,
      '(' .. execution_id .. '!', 'BYLEX')) do
    local hold = budgets.hold(b, string.sub(name, #prefix + 1))
    if hold and hold.epoch <= epoch then found[#found + 1] = hold end
  end
  return found
end

-- How a reservation ended: `settled` or `released`, whose it was, and the first answer to it.
function budgets.ended_hold(b, reservation_id)
  local packed = server.call('GET', K.settled(b.tag, b.id, reservation_id))
  local mark = packed and cmsgpack.unpack(packed)
  return mark and mark.incarnation == b.def.incarnation and mark or nil
end

function budgets.end_hold(b, hold, how)
  local mark = { how = how, execution_id = hold.execution_id, answer = hold.answer,
    incarnation = b.def.incarnation }
  server.call('SET', K.settled(b.tag, b.id, hold.id), cmsgpack.pack(mark), 'PX',
    values.text(budgets.dedup_ms(b)))
end
