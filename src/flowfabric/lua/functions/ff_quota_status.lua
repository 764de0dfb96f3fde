-- ff_quota_status: the limits of quota policies, and how much of them is used.
-- Keys (tag = quota partition): policy, window, admitted_set.
-- Arguments: any number of policy ids.
-- Replies per policy: the limits, created_at, window count, slots held, oldest entry or empty,
--   ms until the next admission or empty, name or empty | nothing if there is no such policy | [0, code, detail].
-- Errors: none.
local function next_admission(q, count, held, oldest)
  if q.rate > 0 and count >= q.rate then return oldest + q.window_ms - q.now end
  if q.cap == 0 or held < q.cap then return 0 end
  local free = quota.first_end(q)
  return free and free - q.now or ''
end

local function status(tag, id)
  local q = quota.read(tag, id)
  if not q then return false end
  local count, held, oldest = quota.window_count(q), quota.slots_held(q), quota.oldest(q)
  local row = { unpack(q.limits) }
  values.append(row, { q.stored.created_at or '', count, held, oldest or '',
    next_admission(q, count, held, oldest), q.stored.name or '' })
  return row
end

register('ff_quota_status', function(keys, args)
  local rows = {}
  for i = 1, #args do rows[i] = quota.guarded(args[i], status, keys[1], args[i]) end
  return reply.ok(rows)
end, { 'no-writes' })
