-- What a worker offers, and the waiting executions that it may therefore take, in fair turns.

-- A claim looks at most this far into one index, at most at this many candidates of all indexes
-- together, and at most into the indexes of this many signatures.
local MAX_LOOKED, MAX_CANDIDATES, MAX_COVERED = 256, 1024, 128
offers.MAX_LOOKED = MAX_LOOKED

local NONE = {}

-- Offered besides the tasks that the worker knows: it takes no others.
local NO_OTHER_TASKS = 'task:'

-- The required tokens that are not offered, as a sorted CSV, or nil.
function offers.missing(required, offered)
  if not required then return nil end
  local absent
  for token in string.gmatch(required, '[^,]+') do
    if not offered.tokens[token] then absent = absent and absent .. ',' .. token or token end
  end
  return absent
end

-- Signatures that a worker of these namespaces certainly covers: those that name one of its tokens.
local function own_signatures(namespaces, tokens)
  local own = namespaces and {} or values.slice(tokens, 1, #tokens)
  for _, namespace in ipairs(namespaces or NONE) do
    local prefix = waiting.namespace_prefix(namespace)
    if prefix ~= '' then own[#own + 1] = prefix end
    for _, token in ipairs(tokens) do own[#own + 1] = prefix .. token end
  end
  return own
end

-- What a worker offers, from `<tokens CSV>[ <namespace>...]`; without namespaces it serves all.
-- `covers` tells whether it may take executions with a signature.
offers.of = values.memo(function(text)
  local csv, rest = string.match(text, '^(%S*)(.*)$')
  local offered, tokens, namespaces = { tokens = {} }, {}, rest ~= '' and {} or nil
  for token in string.gmatch(csv, '[^,]+') do
    offered.tokens[token], tokens[#tokens + 1] = true, token
  end
  local serves = {}
  for namespace in string.gmatch(rest, '%S+') do
    namespaces[#namespaces + 1], serves[namespace] = namespace, true
  end
  offered.no_other_tasks = offered.tokens[NO_OTHER_TASKS]
  offered.namespaces = namespaces
  offered.serves_default = not namespaces or serves.default or false
  offered.own = own_signatures(namespaces, tokens)
  offered.covers = values.memo(function(signature)
    local namespace, required = waiting.parts(signature)
    return (not namespaces or serves[namespace] or false)
      and not offers.missing(required, offered)
  end)
  return offered
end)

-- Whether a worker may take an execution. One that was left to others has its task in its signature.
function offers.takes(offered, rec)
  local signature = waiting.signature(rec)
  if not signature then return offered.serves_default end
  return offered.covers(signature)
end

-- An offer without the namespaces in which the worker is being drained; nil if none is left.
function offers.undrained(c, want, offered)
  local drained = workers.drained_in(c, want.worker)
  if not drained then return offered end
  local any = not offered.namespaces
  for _, namespace in ipairs(offered.namespaces or NONE) do any = any or not drained[namespace] end
  if drained['*'] or not any then return nil end
  return setmetatable({
    serves_default = offered.serves_default and not drained.default,
    covers = function(signature)
      return not drained[waiting.parts(signature)] and offered.covers(signature)
    end,
  }, { __index = offered })
end

-- The number of the last lease of each namespace, by lane and partition. The namespace that has waited
-- longest for one is next, whichever workers serve it. Only fairness depends on this, so it is not stored.
local last_lease, known_turns, leases, MAX_TURNS = {}, 0, 0, 10000

function offers.served(c, want, namespace)
  local place = K.eligible(c.tag, want.lane)
  local numbers = last_lease[place]
  if not numbers or not numbers[namespace] then
    if known_turns >= MAX_TURNS then last_lease, known_turns, numbers = {}, 0, nil end
    known_turns = known_turns + 1
    numbers = numbers or {}
    last_lease[place] = numbers
  end
  leases = leases + 1
  numbers[namespace] = leases
end

-- The namespaces with work that this worker may take, the next one first. Each has the signatures
-- to look at; false stands for the plain index.
local function in_turn(c, want, offered)
  local by_name, names = {}, {}
  local function add(namespace, signature)
    if not by_name[namespace] then
      by_name[namespace], names[#names + 1] = {}, namespace
    end
    table.insert(by_name[namespace], signature)
  end
  if offered.serves_default then add('default', false) end
  for _, signature in ipairs(waiting.signatures(K.lane(c.tag, want.lane, 'sigs'), offered.own)) do
    if offered.covers(signature) then add(waiting.parts(signature), signature) end
  end
  local numbers, ordered = last_lease[K.eligible(c.tag, want.lane)] or NONE, {}
  table.sort(names, function(a, b)
    local last_a, last_b = numbers[a] or 0, numbers[b] or 0
    if last_a ~= last_b then return last_a < last_b end
    return a < b
  end)
  for i, name in ipairs(names) do ordered[i] = { name = name, signatures = by_name[name] } end
  return ordered
end

-- Up to `most` of a namespace's signatures: another part at another time, so that none starves.
local function part_of(signatures, most, now)
  if #signatures <= most then return signatures end
  local part, first = {}, now % #signatures
  for i = 1, most do part[i] = signatures[(first + i) % #signatures + 1] end
  return part
end

-- Those namespaces, and how far the claim looks into each index. `want.unseen`: whether it leaves out
-- indexes that it could look into.
local function covered(c, want, offered)
  if not want.spaces then
    want.spaces, want.signature_in, want.rest = {}, {}, {}
    local count = 0
    for _, space in ipairs(in_turn(c, want, offered)) do
      local part = part_of(space.signatures, MAX_COVERED - count, c.now)
      if #part < #space.signatures then space.signatures, want.unseen = part, true end
      if #part == 0 then break end
      want.spaces[#want.spaces + 1] = space
      count = count + #part
    end
    want.most_looked = math.max(1, math.min(MAX_LOOKED, math.ceil(MAX_CANDIDATES / (2 * math.max(1, count)))))
  end
  return want.spaces
end

-- The part of the offer for which the worker is not being drained here, or nil; and whether the claim
-- is plain: the lane has no settings here, nothing to reclaim, and no signature that the worker covers.
function offers.opened(c, want, offered)
  local lane = want.lane
  local lost, config = K.lane(c.tag, lane, 'reclaimable'), K.lane(c.tag, lane, 'config')
  -- Usually none of these exists, and one command tells it.
  if not offered.serves_default or server.call('EXISTS', K.lane(c.tag, lane, 'sigs'), lost, config,
      K.index(c.tag, 'draining')) > 0 then
    offered = offers.undrained(c, want, offered)
    if not offered or not offered.serves_default or server.call('EXISTS', lost, config) > 0
        or not offers.only_plain(covered(c, want, offered)) then
      return offered, false
    end
  end
  c.lanes[lane] = Context.DEFAULTS
  return offered, true
end

function offers.only_plain(spaces) return #spaces == 1 and #spaces[1].signatures == 1 end

local function best_first(a, b)
  if a.score ~= b.score then return a.score < b.score end
  return a.id < b.id
end

local function note_source(want, crowded, key, signature, found, limit)
  if found == limit then crowded[key] = found end
  want.signature_in[key] = signature
end

-- The candidates of the only index that a namespace has: their order needs no scores.
local function queue_of_one(c, want, space, limit, crowded)
  local signature = space.signatures[1] or nil
  local key = K.eligible(c.tag, want.lane, signature)
  local ids = server.call('ZRANGE', key, 0, limit - 1)
  note_source(want, crowded, key, signature, #ids, limit)
  if signature and not ids[1] then server.call('SREM', K.lane(c.tag, want.lane, 'sigs'), signature) end
  return { namespace = space.name, at = 0, ids = ids, keys = NONE, key = key }
end

-- The candidates of one namespace, best first.
local function queue_of(c, want, space, limit, crowded)
  local found, sources = {}, 0
  local function add(key, signature)
    local page = server.call('ZRANGE', key, 0, limit - 1, 'WITHSCORES')
    for i = 1, #page, 2 do
      found[#found + 1] = { id = page[i], score = tonumber(page[i + 1]), key = key }
    end
    if #page > 0 then sources = sources + 1 end
    note_source(want, crowded, key, signature, #page / 2, limit)
    return #page > 0
  end
  for _, signature in ipairs(space.signatures) do
    signature = signature or nil
    local any = add(K.eligible(c.tag, want.lane, signature), signature)
    any = add(K.reclaimable(c.tag, want.lane, signature), signature) or any
    if signature and not any then
      server.call('SREM', K.lane(c.tag, want.lane, 'sigs'), signature)
    end
  end
  if sources > 1 then table.sort(found, best_first) end
  local queue = { namespace = space.name, at = 0, ids = {}, keys = {} }
  for i, candidate in ipairs(found) do
    queue.ids[i], queue.keys[i] = candidate.id, candidate.key
    if crowded[candidate.key] then crowded[candidate.key] = i end
  end
  return queue
end

-- Whether executions with lost leases wait in one of the namespaces' indexes.
local function any_lost(c, want, spaces)
  local keys = {}
  for _, space in ipairs(spaces) do
    for _, signature in ipairs(space.signatures) do
      keys[#keys + 1] = K.reclaimable(c.tag, want.lane, signature or nil)
    end
  end
  return server.call('EXISTS', unpack(keys)) > 0
end

-- Executions that this worker could claim, in a queue per namespace, the next one first. A queue has
-- ids, best first, and the index of each, or `key` for all. Also returns the indexes that may hold
-- more, each with the position of its last candidate.
function offers.candidates(c, want, offered, limit)
  if want.plain then
    local eligible = K.eligible(c.tag, want.lane)
    local ids = server.call('ZRANGE', eligible, 0, limit - 1)
    return { { at = 0, ids = ids, keys = NONE, key = eligible } },
      #ids == limit and { [eligible] = limit } or NONE
  end
  local queues, crowded = {}, {}
  local spaces = covered(c, want, offered)
  limit = math.min(limit, want.most_looked)
  local lost = spaces[1] and any_lost(c, want, spaces)
  for _, space in ipairs(spaces) do
    local queue_in = (lost or #space.signatures > 1) and queue_of or queue_of_one
    local queue = queue_in(c, want, space, limit, crowded)
    if queue.ids[1] then queues[#queues + 1] = queue end
  end
  return queues, crowded
end
