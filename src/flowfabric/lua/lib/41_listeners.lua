-- In a cluster: which idle workers wait for a ring, and which rings wait for an idle worker. Only this
-- node's memory holds this. When it is lost, every listener is asked to register again.

local MAX_LISTENERS, MAX_GROUPS, MAX_BELLS, MAX_RINGS = 10000, 1000, 1000, 10000
local TIDY_PAUSE_MS = 1000

-- Idle listeners by id. Those with the same offer and lanes form a group. A bell has a queue of the
-- groups that may take its work; a group without idle listeners leaves it until one registers.
local idle, listed, groups, group_count, queues, queue_count = {}, 0, {}, 0, {}, 0
-- Rings that no listener heard, by lane and bell.
local rings, ring_count, kept_bells, turn = {}, 0, 0, 0
local called, tidy_at = false, 0

local function deque() return { first = 1, last = 0 } end

local function push(queue, item)
  queue.last = queue.last + 1
  queue[queue.last] = item
end

local function shift(queue)
  local item = queue[queue.first]
  queue[queue.first] = nil
  queue.first = queue.first + 1
  return item
end

local function is_empty(queue) return queue.first > queue.last end

local function may_take(group, lane, signature)
  if not group.lanes[lane] then return false end
  if not signature then return group.offered.serves_default end
  return group.offered.covers(signature)
end

local function forget_queues()
  queues, queue_count = {}, 0
  for _, group in pairs(groups) do group.left = {} end
end

local function queue_of(bell, lane, signature)
  local queue = queues[bell]
  if queue then return queue end
  if queue_count >= MAX_BELLS then forget_queues() end
  queue = deque()
  queue.lane, queue.signature = lane, signature
  for _, group in pairs(groups) do
    if may_take(group, lane, signature) then push(queue, group) end
  end
  queues[bell], queue_count = queue, queue_count + 1
  return queue
end

local function remove(listener)
  local all = listener.group.listeners
  local last = all[#all]
  all[listener.at], last.at = last, listener.at
  all[#all], idle[listener.id], listed = nil, nil, listed - 1
end

local number_of = values.memo(function(tag) return tonumber(string.match(tag, '%d+')) end)

-- An idle listener of a group, or nil. Rings of several primaries at once should not pick the same.
local function pick(group, c)
  local all, from = group.listeners, c.now + number_of(c.tag)
  while #all > 0 do
    local listener = all[from % #all + 1]
    if listener.ends > c.now then return listener end
    remove(listener)
  end
end

local function keep_ring(tag, bell, lane, signature)
  local kept = rings[lane] and rings[lane][bell]
  if kept and kept.turn_of[tag] then return end
  if ring_count >= MAX_RINGS or (not kept and kept_bells >= MAX_BELLS) then
    -- Most of them are for work that nobody here can take. The `doorbell` scanner rings again.
    rings, ring_count, kept_bells, kept = {}, 0, 0, nil
  end
  if not kept then
    kept = { tags = deque(), turn_of = {}, bell = bell, signature = signature }
    rings[lane] = rings[lane] or {}
    rings[lane][bell], kept_bells = kept, kept_bells + 1
  end
  turn, ring_count = turn + 1, ring_count + 1
  kept.turn_of[tag] = turn
  push(kept.tags, tag)
end

-- The oldest kept ring that concerns a group: its bell and the tag of its partition, or nil.
local function take_ring(group)
  local oldest, oldest_turn, in_lane
  for lane in pairs(group.lanes) do
    for _, kept in pairs(rings[lane] or {}) do
      local its_turn = kept.turn_of[kept.tags[kept.tags.first]]
      if (not oldest or its_turn < oldest_turn) and may_take(group, lane, kept.signature) then
        oldest, oldest_turn, in_lane = kept, its_turn, lane
      end
    end
  end
  if not oldest then return nil end
  local tag = shift(oldest.tags)
  oldest.turn_of[tag], ring_count = nil, ring_count - 1
  if is_empty(oldest.tags) then
    rings[in_lane][oldest.bell], kept_bells = nil, kept_bells - 1
    if not next(rings[in_lane]) then rings[in_lane] = nil end
  end
  return oldest.bell, tag
end

-- Asks all who listen to register, once: this node's memory is new and knows none of them.
local function call_all(tag)
  if called then return end
  server.call('SPUBLISH', K.wake(tag), '')
  called = true
end

-- Wakes one idle listener that may take the work, or keeps the ring for the next one. A listener that
-- is woken registers again when it waits again; one that does not hear the ring has gone.
function listeners.ring(c, bell, lane, signature)
  local queue = queue_of(bell, lane, signature)
  while not is_empty(queue) do
    local group = queue[queue.first]
    local listener = pick(group, c)
    if listener then
      local heard = server.call('SPUBLISH', K.own_wake(c.tag, listener.id), bell)
      remove(listener)
      if heard > 0 then
        if queue.first < queue.last then push(queue, shift(queue)) end
        return
      end
    else
      shift(queue)
      group.left[#group.left + 1] = queue
    end
  end
  keep_ring(c.tag, bell, lane, signature)
  call_all(c.tag)
end

-- Removes listeners that have gone, to make room.
local function tidy(now)
  if now < tidy_at then return end
  tidy_at = now + TIDY_PAUSE_MS
  for text, group in pairs(groups) do
    local all = group.listeners
    for i = #all, 1, -1 do
      if all[i].ends <= now then remove(all[i]) end
    end
    if #all == 0 then groups[text], group_count = nil, group_count - 1 end
  end
  forget_queues()
end

local function group_of(offer, lanes)
  local text = offer .. '\n' .. table.concat(lanes, '\n')
  local group = groups[text]
  if group then return group end
  if group_count >= MAX_GROUPS then return nil end
  group = { lanes = {}, offered = offers.of(offer), listeners = {}, left = {} }
  for _, lane in ipairs(lanes) do group.lanes[lane] = true end
  groups[text], group_count = group, group_count + 1
  for _, queue in pairs(queues) do
    if may_take(group, queue.lane, queue.signature) then push(queue, group) end
  end
  return group
end

local function enlist(now, id, ms, group)
  local known = idle[id]
  if known and known.group == group then
    known.ends = now + ms
    return
  end
  if known then remove(known) end
  if listed >= MAX_LISTENERS then return end
  local all = group.listeners
  local listener = { id = id, ends = now + ms, group = group, at = #all + 1 }
  all[listener.at], idle[id], listed = listener, listener, listed + 1
  for _, queue in ipairs(group.left) do push(queue, group) end
  group.left = {}
end

-- Registers an idle listener for `ms`, or gives it the ring that has waited longest: bell and tag.
function listeners.register(tag, now, id, ms, offer, lanes)
  call_all(tag)
  if listed >= MAX_LISTENERS or group_count >= MAX_GROUPS then tidy(now) end
  local group = group_of(offer, lanes)
  if not group then return nil end
  local bell, place = take_ring(group)
  if bell then
    if idle[id] then remove(idle[id]) end
    return bell, place
  end
  enlist(now, id, ms, group)
end
