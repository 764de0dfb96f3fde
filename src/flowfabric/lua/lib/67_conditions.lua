-- Resume conditions. A signal adds a mark to every leaf that accepts it: one for a Single, one per
-- distinct satisfier for a Count. Progress is the number of different marks per leaf.

local function matches(matcher, name)
  if matcher == nil or matcher == 'Wildcard' then return true end
  if type(matcher) ~= 'table' then return false end
  return matcher.ByName == name or (matcher.AnyName ~= nil and values.contains(matcher.AnyName, name))
end

local SATISFIERS = {
  Single = function() return '' end,
  DistinctWaitpoints = function(signal) return signal.key end,
  DistinctSignals = function(signal) return signal.id end,
  -- The length makes the pair unambiguous.
  DistinctSources = function(signal)
    return #signal.source_type .. ':' .. signal.source_type .. signal.source_identity
  end,
  DistinctOperators = function(signal)
    return signal.source_type == 'operator' and signal.source_identity or nil
  end,
}

local function leaf_of(node)
  local one, count = node.Single, node.Composite
  if one then
    return { keys = { one.waitpoint_key }, matcher = one.matcher, kind = 'Single', needed = 1 }
  end
  return { keys = count.waitpoints, matcher = count.matcher, kind = count.count_kind,
    needed = tonumber(count.n) }
end

-- Calls `visit(leaf, path)` for every Single and Count.
local function each_leaf(node, path, visit)
  if type(node) ~= 'table' then return end
  if node.Composite and node.Composite.kind == 'AllOf' then
    for i, each in ipairs(node.Composite.members) do each_leaf(each, path .. '.' .. i, visit) end
  elseif node.Composite or node.Single then
    visit(leaf_of(node), path)
  end
end

-- The marks a signal makes, and whether any leaf refers to its waitpoint.
function conditions.marks(condition, signal)
  local made, referred = {}, false
  each_leaf(condition, 'r', function(leaf, path)
    if not values.contains(leaf.keys, signal.key) then return end
    referred = true
    local satisfier = matches(leaf.matcher, signal.name) and SATISFIERS[leaf.kind](signal)
    if satisfier then made[#made + 1] = { path = path, name = path .. '\0' .. satisfier } end
  end)
  return made, referred
end

-- The stored progress: the number of marks by leaf, and the marks themselves.
function conditions.progress(key, condition, made)
  local names, progress = {}, {}
  each_leaf(condition, 'r', function(_, path) names[#names + 1] = path end)
  for _, mark in ipairs(made) do names[#names + 1] = mark.name end
  for first, last in values.pieces(names) do
    local found = server.call('HMGET', key, unpack(names, first, last))
    for i, value in ipairs(found) do progress[names[first + i - 1]] = value end
  end
  return progress
end

-- Adds marks to the progress; returns the new fields to store.
function conditions.contribute(progress, made)
  local fields = {}
  for _, mark in ipairs(made) do
    if not progress[mark.name] then
      local count = (progress[mark.path] or 0) + 1
      progress[mark.name], progress[mark.path] = '1', count
      values.append(fields, { mark.path, count, mark.name, '1' })
    end
  end
  return fields
end

function conditions.satisfied(condition, progress)
  local leaves, unmet = 0, 0
  each_leaf(condition, 'r', function(leaf, path)
    leaves = leaves + 1
    if tonumber(progress[path] or 0) < leaf.needed then unmet = unmet + 1 end
  end)
  return leaves > 0 and unmet == 0
end
