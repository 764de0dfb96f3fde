-- Every key name, built from the partition's hash tag (`{fp:N}`) and ids.
-- core/keys.py builds the same names; a test compares the two.
local K = {}

-- `:` separates the parts of a key, so a lane name is escaped to stay one part.
function K.lane_part(lane)
  if string.find(lane, '[:%%]') then
    return (string.gsub(lane, '[:%%]', { [':'] = '%3A', ['%'] = '%25' }))
  end
  return lane
end

-- Building a string costs more than most commands: names that a call uses again and
-- again are remembered, in one table per partition, up to a bound.
local remembered, remembered_count = {}, 0
local REMEMBERED_MAX = 20000

local function remember(tag, group, name, built)
  if remembered_count >= REMEMBERED_MAX then remembered, remembered_count = {}, 0 end
  remembered_count = remembered_count + 1
  local by_tag = remembered[tag] or {}
  remembered[tag] = by_tag
  by_tag[group] = by_tag[group] or {}
  by_tag[group][name] = built
  return built
end

local function recall(tag, group, name)
  local by_tag = remembered[tag]
  local by_group = by_tag and by_tag[group]
  return by_group and by_group[name]
end

local last_core_id, last_core
function K.core(tag, id)
  if id ~= last_core_id then
    last_core_id, last_core = id, 'ff:exec:' .. tag .. ':' .. id .. ':core'
  end
  return last_core
end
function K.payload(tag, id) return 'ff:exec:' .. tag .. ':' .. id .. ':payload' end
function K.result(tag, id) return 'ff:exec:' .. tag .. ':' .. id .. ':result' end
function K.policy(tag, id) return 'ff:exec:' .. tag .. ':' .. id .. ':policy' end
function K.tags(tag, id) return 'ff:exec:' .. tag .. ':' .. id .. ':tags' end
function K.history(tag, id) return 'ff:exec:' .. tag .. ':' .. id .. ':history' end
function K.grant(tag, id) return 'ff:exec:' .. tag .. ':' .. id .. ':claim_grant' end
function K.steps(tag, id) return 'ff:exec:' .. tag .. ':' .. id .. ':steps' end
function K.unresolved(tag, id) return 'ff:exec:' .. tag .. ':' .. id .. ':deps:unresolved' end
function K.attempt(tag, id, index) return 'ff:attempt:' .. tag .. ':' .. id .. ':' .. index end
function K.idem(tag, namespace, key) return 'ff:idem:' .. tag .. ':' .. namespace .. ':' .. key end
function K.index(tag, name)
  return recall(tag, 1, name) or remember(tag, 1, name, 'ff:idx:' .. tag .. ':' .. name)
end
function K.lane(tag, lane, name)
  return recall(tag, lane, name)
    or remember(tag, lane, name, 'ff:idx:' .. tag .. ':lane:' .. K.lane_part(lane) .. ':' .. name)
end
function K.eligible(tag, lane, signature)
  if signature == nil or signature == '' then return K.lane(tag, lane, 'eligible') end
  return K.lane(tag, lane, 'eligible:' .. signature)
end
function K.worker_leases(tag, instance)
  return recall(tag, 2, instance)
    or remember(tag, 2, instance, 'ff:idx:' .. tag .. ':worker:' .. instance .. ':leases')
end
function K.last_claim(tag, lane, instance) return K.lane(tag, lane, 'claimed:' .. instance) end
function K.events(tag)
  return recall(tag, 3, 'events') or remember(tag, 3, 'events', 'ff:part:' .. tag .. ':events')
end
function K.wake(tag, lane)
  if SETTINGS.cluster then return 'ff:wake:' .. tag end
  return 'ff:wake:' .. lane
end
