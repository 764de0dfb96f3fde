-- Quota policies (spec 07 §10). All keys of a policy are on its own partition, `{q:K}`:
-- window: execution -> time of its admission;
-- guards: execution -> the request that admitted it, until it is released or its window entry ends;
-- slots: execution -> when its slot ends, for policies with a cap;
-- blocked: execution -> since when it waits.

-- The slot of a claimed execution does not end by time: it has this plus the time of the claim.
quota.CLAIMED = 1e13
local DEFAULT_WINDOW_MS = 60000
-- The claim follows the admission by a moment.
local SLACK_MS = 500
-- How many entries that ended one call removes; counts do not rely on it.
local REMOVED_AT_ONCE = 1000
-- In place of a request: another call relies on the admission, so nobody may undo it.
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
  q.window_ms = seconds > 0 and seconds * 1000 or DEFAULT_WINDOW_MS
  q.edge = q.now - q.window_ms
  q.window, q.guards = K.quota_window(tag, id), K.quota_guards(tag, id)
  q.slots = K.quota_slots(tag, id)
  return q
end

-- What `handle(...)` answers about a policy; `corruption` if its keys cannot be read.
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

-- Removes entries that left the window, and slots that ended.
function quota.trim(q)
  local past, free = ended(q.window, q.edge), ended(q.slots, q.now)
  values.call('ZREM', q.window, past)
  values.call('HDEL', q.guards, past)
  values.call('ZREM', q.slots, free)
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

-- What the policy stores of each execution, and what this call adds.
local function read_entries(q, ids)
  local found = {}
  local times = server.call('ZMSCORE', q.window, unpack(ids))
  local guards = server.call('HMGET', q.guards, unpack(ids))
  local slots = q.cap > 0 and server.call('ZMSCORE', q.slots, unpack(ids)) or {}
  for i, id in ipairs(ids) do
    local counted = times[i] and tonumber(times[i]) > q.edge
    local slot = slots[i] and tonumber(slots[i])
    found[id] = { counted = counted, guard = counted and guards[i] or nil,
      slot = slot and slot > q.now and slot or nil }
  end
  return found
end

local function admit_one(q, entry, request, ends)
  if entry.guard and (entry.slot or q.cap == 0) then
    if entry.slot and entry.slot < quota.CLAIMED then entry.new_slot, entry.slot = ends, ends end
    -- The repeat of a call whose reply was lost.
    if entry.guard == request then return 'admitted' end
    if entry.guard ~= SHARED then entry.guard, entry.new_guard = SHARED, SHARED end
    return 'already'
  end
  if not entry.guard and q.rate > 0 and q.count >= q.rate then return 'rate' end
  if q.cap > 0 and q.held - (entry.slot and 1 or 0) >= q.cap then return 'concurrency' end
  if not entry.guard then
    if not entry.counted then q.count = q.count + 1 end
    entry.counted, entry.new_time = true, true
  end
  entry.guard, entry.new_guard = request, request
  -- A claimed execution keeps its slot as it is: whoever asks for it again asks too late.
  if q.cap > 0 and not (entry.slot and entry.slot >= quota.CLAIMED) then
    if not entry.slot then q.held = q.held + 1 end
    entry.slot, entry.new_slot = ends, ends
  end
  return 'admitted'
end

local function store(q, entries)
  local times, guards, slots = {}, {}, {}
  for id, entry in pairs(entries) do
    if entry.new_time then values.append(times, { values.text(q.now), id }) end
    if entry.new_guard then values.append(guards, { id, entry.new_guard }) end
    if entry.new_slot then values.append(slots, { values.text(entry.new_slot), id }) end
  end
  values.call('ZADD', q.window, times)
  values.call('HSET', q.guards, guards)
  values.call('ZADD', q.slots, slots)
end

-- Admits executions in order: `admitted`, `already`, `rate <retry ms>`, or `concurrency <retry ms>`
-- (without a number if every slot belongs to a claimed execution). A denial records nothing.
function quota.admit(q, ids, request, slot_ttl)
  quota.trim(q)
  local entries = read_entries(q, ids)
  local ends = math.min(q.now + slot_ttl + SLACK_MS, quota.CLAIMED - 1)
  q.count, q.held = quota.window_count(q), q.cap > 0 and quota.slots_held(q) or 0
  local answers, denied = {}, nil
  for i, id in ipairs(ids) do
    answers[i] = admit_one(q, entries[id], request, ends)
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

-- Those whose admission this request recorded, and that no other call relies on.
local function recorded_by(q, ids, request)
  local guards, own = server.call('HMGET', q.guards, unpack(ids)), {}
  for i, id in ipairs(ids) do
    if guards[i] == request then own[#own + 1] = id end
  end
  return own
end

-- Those without a slot that a claim has confirmed.
local function unclaimed(q, ids)
  local ends, found = server.call('ZMSCORE', q.slots, unpack(ids)), {}
  for i, id in ipairs(ids) do
    if not ends[i] or tonumber(ends[i]) < quota.CLAIMED then found[#found + 1] = id end
  end
  return found
end

-- Undoes what a request recorded. The slot of an execution that runs stays: another claim has it.
local function undo(q, ids, request)
  ids = recorded_by(q, ids, request)
  if #ids == 0 then return 0 end
  local free = unclaimed(q, ids)
  server.call('HDEL', q.guards, unpack(ids))
  local freed = server.call('ZREM', q.window, unpack(ids))
  return #free > 0 and freed + server.call('ZREM', q.slots, unpack(free)) or freed
end

-- Frees the slots of executions; with a request, undoes what that request recorded. Returns how many
-- places it freed.
function quota.release(q, ids, request)
  if request ~= '' then return undo(q, ids, request) end
  if #ids == 0 then return 0 end
  server.call('HDEL', q.guards, unpack(ids))
  return server.call('ZREM', q.slots, unpack(ids))
end
