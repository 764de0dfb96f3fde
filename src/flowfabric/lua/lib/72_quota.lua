-- Quota policies (spec 07 §10). All keys of a policy are on its own partition, `{q:K}`:
-- window: execution -> time of its admission;
-- guards: execution -> `<run> <request> <time before>`: the run that was admitted, the request that
--   did it, and the time in the window that it replaced, if any. A guard lasts as long as the window
--   entry or the slot, unless it is released;
-- slots: execution -> when its slot ends, for policies with a cap;
-- blocked: execution -> since when it waits.
-- The runs of an execution are numbered (`admission.run`): what a call says about a run never touches
-- what a later run holds, however late the call arrives.

-- The slot of a claimed execution has no end: its score is this plus the number of the run.
quota.CLAIMED = 1e13
local DEFAULT_WINDOW_MS = 60000
-- The grant is issued a moment after the admission.
local SLACK_MS = 500
-- How many expired entries one call removes. Counts leave out those that remain.
local REMOVED_AT_ONCE = 1000
-- Stored instead of a request: another call relies on the admission, so no call may undo it.
local SHARED = '*'
quota.FIELDS = {
  'requests_per_window_seconds', 'max_requests_per_window', 'active_concurrency_cap', 'jitter_ms',
}

local function whole(id, stored, name)
  local text = stored[name]
  if not text then return 0 end
  if not string.find(text, '^%d+$') or tonumber(text) > clock.END then
    reply.refuse('corruption', 'quota ' .. id .. ': ' .. name .. ': is not a whole number')
  end
  return tonumber(text)
end

-- The policy with its limits as numbers, or nil.
function quota.read(tag, id, now)
  local flat = server.call('HGETALL', K.quota(tag, id))
  if #flat == 0 then return nil end
  local stored = values.fields(flat)
  local q = { tag = tag, id = id, now = now or clock.now(), stored = stored, limits = {} }
  for i, name in ipairs(quota.FIELDS) do q.limits[i] = whole(id, stored, name) end
  local seconds
  seconds, q.rate, q.cap, q.jitter = unpack(q.limits)
  q.window_ms = seconds > 0 and math.min(seconds * 1000, clock.END) or DEFAULT_WINDOW_MS
  q.edge = math.max(0, q.now - q.window_ms)
  q.window, q.guards = K.quota_window(tag, id), K.quota_guards(tag, id)
  q.slots = K.quota_slots(tag, id)
  return q
end

-- The reply of `handle(...)` about a policy; `corruption` if its keys cannot be read.
function quota.guarded(id, handle, ...)
  local ok, answer = try(handle, ...)
  if ok then return answer end
  return reply.err('corruption', 'quota ' .. id .. ': stored keys: ' .. answer)
end

-- Registers `handle(q, args)` for the policy that the first argument names.
function quota.register_function(name, handle, flags)
  register(name, function(keys, args)
    return quota.guarded(args[1], function()
      local q = quota.read(keys[1], args[1])
      if not q then return reply.err('quota_policy_not_found') end
      return handle(q, args)
    end)
  end, flags)
end

local function count_after(key, moment)
  return server.call('ZCOUNT', key, '(' .. values.text(moment), '+inf')
end
function quota.window_count(q) return count_after(q.window, q.edge) end
function quota.slots_held(q) return count_after(q.slots, q.now) end

local function first_after(key, moment)
  return tonumber(server.call('ZRANGE', key, '(' .. values.text(moment), '+inf', 'BYSCORE',
    'LIMIT', 0, 1, 'WITHSCORES')[2])
end

-- The time of the oldest admission in the window, or nil.
function quota.oldest(q) return first_after(q.window, q.edge) end

-- When the first slot without a claim ends, or nil.
function quota.first_end(q)
  local ends = first_after(q.slots, q.now)
  return ends and ends < quota.CLAIMED and ends or nil
end

local function ended(key, moment)
  return server.call('ZRANGE', key, '-inf', values.text(moment), 'BYSCORE', 'LIMIT', 0, REMOVED_AT_ONCE)
end

-- Removes members of one sorted set, and the guards of those that the other one does not have.
local function remove(q, key, ids, other)
  if #ids == 0 then return end
  values.call('ZREM', key, ids)
  local found, bare = server.call('ZMSCORE', other, unpack(ids)), {}
  for i, id in ipairs(ids) do
    if not found[i] then bare[#bare + 1] = id end
  end
  values.call('HDEL', q.guards, bare)
end

-- Removes entries that left the window, and slots that ended.
function quota.trim(q)
  local past, free = ended(q.window, q.edge), ended(q.slots, q.now)
  remove(q, q.window, past, q.slots)
  remove(q, q.slots, free, q.window)
  return #past + #free
end

-- How many executions it admits now; nil without limit.
function quota.headroom(q)
  local by_rate = q.rate > 0 and q.rate - quota.window_count(q)
  local by_cap = q.cap > 0 and q.cap - quota.slots_held(q)
  local room = by_rate and by_cap and math.min(by_rate, by_cap) or by_rate or by_cap
  return room and math.max(0, room)
end

-- What a change may have opened, if executions wait: the headroom, and if a full window leaves none,
-- the ms until it has a place. Otherwise 0 and 0.
function quota.opening(q)
  if server.call('EXISTS', K.quota_blocked(q.tag, q.id)) == 0 then return 0, 0 end
  local room = quota.headroom(q) or clock.END
  local full = room == 0 and q.rate > 0 and quota.window_count(q) >= q.rate
  return room, full and quota.oldest(q) + q.window_ms - q.now or 0
end

-- The guards of executions, and when their slots end.
local function read_guards(q, ids)
  local texts, guards = server.call('HMGET', q.guards, unpack(ids)), {}
  for i = 1, #ids do
    local run, request, before = string.match(texts[i] or '', '^(%d+) (%S+) (%d*)$')
    guards[i] = run and { run = tonumber(run), request = request, before = tonumber(before) } or false
  end
  return guards, server.call('ZMSCORE', q.slots, unpack(ids))
end

-- What the policy stores of each execution, and what this call adds.
local function read_entries(q, ids)
  local found, times = {}, server.call('ZMSCORE', q.window, unpack(ids))
  local guards, slots = read_guards(q, ids)
  for i, id in ipairs(ids) do
    local time, slot = tonumber(times[i] or 0), q.cap > 0 and tonumber(slots[i] or 0) or 0
    local counted = time > q.edge
    local held = slot > q.now
    -- While its slot lasts, a run may still start although its admission has left the window.
    found[id] = { time = counted and time or nil, guard = (counted or held) and guards[i] or nil,
      slot = held and slot or nil }
  end
  return found
end

local function admit_one(q, entry, run, request, ends)
  local guard, slot, before = entry.guard, entry.slot, entry.time
  -- That run was claimed already: its claim will be refused, so it changes nothing here.
  if slot and slot >= quota.CLAIMED + run then return 'already' end
  -- The guard of an earlier run no longer counts.
  if guard and guard.run < run then guard = nil end
  local counted, admitted = guard and before, guard and (slot or q.cap == 0)
  if not counted and q.rate > 0 and q.count >= q.rate then return 'rate' end
  if not admitted and q.cap > 0 and q.held - (slot and 1 or 0) >= q.cap then return 'concurrency' end
  if not counted then
    if not before then q.count = q.count + 1 end
    entry.time, entry.new_time = q.now, true
  end
  if q.cap > 0 then
    if not slot then q.held = q.held + 1 end
    -- Another scheduler may rely on an unclaimed slot until it ends.
    if slot and slot < quota.CLAIMED then ends = math.max(slot, ends) end
    entry.slot, entry.new_slot = ends, ends
  end
  if not admitted then
    entry.guard, entry.new_guard = { run = run, request = request, before = before }, true
  elseif guard.request ~= request then
    guard.request, entry.new_guard = SHARED, true
    return 'already'
  end
  -- Admitted now, or by an earlier call of this request whose reply was lost.
  return 'admitted'
end

local function store(q, entries)
  local times, guards, slots = {}, {}, {}
  for id, entry in pairs(entries) do
    if entry.new_time then values.append(times, { values.text(q.now), id }) end
    if entry.new_guard then
      local guard = entry.guard
      values.append(guards, { id, values.text(guard.run) .. ' ' .. guard.request .. ' '
        .. (guard.before and values.text(guard.before) or '') })
    end
    if entry.new_slot then values.append(slots, { values.text(entry.new_slot), id }) end
  end
  values.call('ZADD', q.window, times)
  values.call('HSET', q.guards, guards)
  values.call('ZADD', q.slots, slots)
end

-- The ids and the numbers of the pairs in `args` from `first` on; `any` in place of an empty one.
function quota.runs(args, first, any)
  local ids, runs = {}, {}
  for i = first, #args, 2 do
    ids[#ids + 1], runs[#runs + 1] = args[i], args[i + 1] == '' and any or tonumber(args[i + 1])
  end
  return ids, runs
end

-- Admits runs of executions in order: `admitted`, `already`, `rate <retry ms>`, or `concurrency
-- <retry ms>` (without a number if every slot belongs to a claimed execution). A denial records
-- nothing.
function quota.admit(q, ids, runs, request, slot_ttl)
  quota.trim(q)
  local entries = read_entries(q, ids)
  local ends = math.min(q.now + slot_ttl + SLACK_MS, quota.CLAIMED - 1)
  q.count, q.held = quota.window_count(q), q.cap > 0 and quota.slots_held(q) or 0
  local answers, denied = {}, nil
  for i, id in ipairs(ids) do
    answers[i] = admit_one(q, entries[id], runs[i], request, ends)
    if answers[i] == 'rate' or answers[i] == 'concurrency' then denied = true end
  end
  store(q, entries)
  if denied then
    local oldest, free = quota.oldest(q), q.cap > 0 and quota.first_end(q)
    local waits = {
      rate = 'rate ' .. values.text(oldest and math.max(0, oldest + q.window_ms - q.now) or 0),
      concurrency = free and 'concurrency ' .. values.text(free - q.now) or nil,
    }
    for i, answer in ipairs(answers) do answers[i] = waits[answer] or answer end
  end
  return answers
end

-- Keeps the slots of claimed runs, even above the cap: running work always counts.
function quota.confirm(q, ids, runs)
  if q.cap == 0 then return end
  local guards, ends = read_guards(q, ids)
  local slots = {}
  for i, id in ipairs(ids) do
    local claimed = quota.CLAIMED + runs[i]
    -- An admission of a later run means that this one is over.
    local over = guards[i] and guards[i].run > runs[i]
    if not over and tonumber(ends[i] or 0) < claimed then
      values.append(slots, { values.text(claimed), id })
    end
  end
  values.call('ZADD', q.slots, slots)
end

-- Undoes what a request recorded; returns how many places it freed. An earlier start stays in the
-- window, and an execution that another claim runs keeps its slot.
function quota.undo(q, ids, request)
  local guards, ends = read_guards(q, ids)
  local own, restored, left, free = {}, {}, {}, {}
  for i, id in ipairs(ids) do
    local guard = guards[i]
    if guard and guard.request == request then
      own[#own + 1] = id
      if guard.before and guard.before > q.edge then
        values.append(restored, { values.text(guard.before), id })
      else
        left[#left + 1] = id
      end
      if ends[i] and tonumber(ends[i]) < quota.CLAIMED + guard.run then free[#free + 1] = id end
    end
  end
  values.call('HDEL', q.guards, own)
  values.call('ZADD', q.window, restored)
  values.call('ZREM', q.window, left)
  values.call('ZREM', q.slots, free)
  return #left + #free
end

-- Frees what the runs of executions up to these hold; returns how many slots.
function quota.release(q, ids, runs)
  local guards, ends = read_guards(q, ids)
  local over, free = {}, {}
  for i, id in ipairs(ids) do
    local guard, slot = guards[i], tonumber(ends[i] or nil)
    if guard and guard.run <= runs[i] then over[#over + 1] = id end
    local run = slot and slot >= quota.CLAIMED and slot - quota.CLAIMED or guard and guard.run or 0
    if slot and run <= runs[i] then free[#free + 1] = id end
  end
  values.call('HDEL', q.guards, over)
  values.call('ZREM', q.slots, free)
  return #free
end
