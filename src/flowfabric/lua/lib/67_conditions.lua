-- Resume conditions. What signals have contributed is a set of marks, one per satisfied leaf
-- (`path`) or distinct satisfier of a Count node (`path`, a zero byte, satisfier), so that a
-- condition is judged from its marks alone and every node counts for itself.
local conditions = {}

local function matches(matcher, name)
  if matcher == nil or matcher == 'Wildcard' then return true end
  return type(matcher) == 'table' and matcher.ByName == name
end

local function lists(keys, wanted)
  for _, key in ipairs(keys) do
    if key == wanted then return true end
  end
  return false
end

local SATISFIERS = {
  DistinctWaitpoints = function(signal) return signal.key end,
  DistinctSignals = function(signal) return signal.id end,
  DistinctSources = function(signal) return signal.source_type .. '\1' .. signal.source_identity end,
}

-- Calls `visit(node, path)` for every leaf: Single and Count.
local function each_leaf(node, path, visit)
  if type(node) ~= 'table' then return end
  if node.Single then
    visit(node, path)
  elseif node.Composite then
    local body = node.Composite
    if body.kind == 'AllOf' then
      for i, member in ipairs(body.members) do each_leaf(member, path .. '.' .. i, visit) end
    else
      visit(node, path)
    end
  end
end

-- The marks a signal makes, and whether any node refers to its waitpoint at all.
function conditions.marks(condition, signal)
  local made, referred = {}, false
  each_leaf(condition, 'r', function(node, path)
    if node.Single then
      if node.Single.waitpoint_key == signal.key then
        referred = true
        if matches(node.Single.matcher, signal.name) then made[#made + 1] = path end
      end
      return
    end
    local count = node.Composite
    if lists(count.waitpoints, signal.key) then
      referred = true
      if matches(count.matcher, signal.name) then
        made[#made + 1] = path .. '\0' .. SATISFIERS[count.count_kind](signal)
      end
    end
  end)
  return made, referred
end

-- Whether the marks satisfy the condition.
function conditions.satisfied(condition, marks)
  local counts = {}
  for _, mark in ipairs(marks) do
    local path = string.match(mark, '^[^%z]+')
    counts[path] = (counts[path] or 0) + 1
  end
  local function holds(node, path)
    if type(node) ~= 'table' then return false end
    if node.Single then return (counts[path] or 0) > 0 end
    local body = node.Composite
    if not body then return false end
    if body.kind == 'Count' then return (counts[path] or 0) >= tonumber(body.n) end
    for i, member in ipairs(body.members) do
      if not holds(member, path .. '.' .. i) then return false end
    end
    return #body.members > 0
  end
  return holds(condition, 'r')
end

-- The signal names that a waitpoint of this key waits for, for people.
function conditions.names(condition, key)
  local names = {}
  each_leaf(condition, 'r', function(node)
    local matcher
    if node.Single and node.Single.waitpoint_key == key then
      matcher = node.Single.matcher
    elseif node.Composite and lists(node.Composite.waitpoints, key) then
      matcher = node.Composite.matcher
    end
    if type(matcher) == 'table' and matcher.ByName then names[#names + 1] = matcher.ByName end
  end)
  return names
end
