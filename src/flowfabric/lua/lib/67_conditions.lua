-- Resume conditions. A signal makes a mark at every leaf that accepts it: one for a Single, one per
-- distinct satisfier for a Count. Progress is the number of different marks at each leaf, so the
-- leaves alone decide, and every node counts for itself.

local function matches(matcher, name)
  if matcher == nil or matcher == 'Wildcard' then return true end
  if type(matcher) ~= 'table' then return false end
  return matcher.ByName == name or (matcher.AnyName ~= nil and values.contains(matcher.AnyName, name))
end

local SATISFIERS = {
  DistinctWaitpoints = function(signal) return signal.key end,
  DistinctSignals = function(signal) return signal.id end,
  -- The length keeps different pairs apart.
  DistinctSources = function(signal)
    return #signal.source_type .. ':' .. signal.source_type .. signal.source_identity
  end,
  DistinctOperators = function(signal)
    return signal.source_type == 'operator' and signal.source_identity or nil
  end,
}

-- Calls `visit(node, path)` for every leaf: Single and Count.
local function each_leaf(node, path, visit)
  if type(node) ~= 'table' then return end
  local body = node.Composite
  if body and body.kind == 'AllOf' then
    for i, member in ipairs(body.members) do each_leaf(member, path .. '.' .. i, visit) end
  elseif body or node.Single then
    visit(node, path)
  end
end

-- The marks a signal makes, and whether any node refers to its waitpoint.
function conditions.marks(condition, signal)
  local made, referred = {}, false
  local function mark(path, satisfier)
    made[#made + 1] = { path = path, name = path .. '\0' .. satisfier }
  end
  each_leaf(condition, 'r', function(node, path)
    if node.Single then
      if node.Single.waitpoint_key == signal.key then
        referred = true
        if matches(node.Single.matcher, signal.name) then mark(path, '') end
      end
      return
    end
    local count = node.Composite
    if values.contains(count.waitpoints, signal.key) then
      referred = true
      local satisfier = matches(count.matcher, signal.name) and SATISFIERS[count.count_kind](signal)
      if satisfier then mark(path, satisfier) end
    end
  end)
  return made, referred
end

function conditions.no_progress() return { counts = {}, seen = {} } end

function conditions.progress(key, condition, made)
  local names, progress = {}, conditions.no_progress()
  each_leaf(condition, 'r', function(_, path) names[#names + 1] = path end)
  local leaves = #names
  for _, mark in ipairs(made) do names[#names + 1] = mark.name end
  for first, last in values.pieces(names) do
    for i, value in ipairs(server.call('HMGET', key, unpack(names, first, last))) do
      local at = first + i - 1
      if at <= leaves then
        progress.counts[names[at]] = tonumber(value or 0)
      elseif value then
        progress.seen[names[at]] = true
      end
    end
  end
  return progress
end

-- Adds marks to the progress; returns the new fields to store.
function conditions.contribute(progress, made)
  local fields = {}
  for _, mark in ipairs(made) do
    if not progress.seen[mark.name] then
      progress.seen[mark.name] = true
      local count = (progress.counts[mark.path] or 0) + 1
      progress.counts[mark.path] = count
      values.append(fields, { mark.path, count, mark.name, '1' })
    end
  end
  return fields
end

function conditions.satisfied(condition, progress)
  local counts = progress.counts
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
