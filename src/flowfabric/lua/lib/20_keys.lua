-- Every key name, built from the partition's hash tag (`{fp:N}`) and ids.
-- engine/valkey/keys.py builds the same names; a test compares the two.

K.LANES = 'ff:idx:lanes'

-- `:` separates the parts of a key, so a lane name is escaped to stay one part.
function K.lane_part(lane)
  if string.find(lane, '[:%%]') then
    return (string.gsub(lane, '[:%%]', { [':'] = '%3A', ['%'] = '%25' }))
  end
  return lane
end

local partition_tag, partition_number
function K.partition(tag)
  if tag ~= partition_tag then partition_tag, partition_number = tag, string.match(tag, '%d+') end
  return partition_number
end

-- Building a string costs more than most commands: names that calls use again and again
-- are kept, in one table per partition and group, up to a bound.
local kept, kept_count = {}, 0
local KEPT_MAX = 20000

-- The kept names of a group; `build` makes those that are missing.
local function names(tag, group, build)
  if kept_count >= KEPT_MAX then kept, kept_count = {}, 0 end
  local by_tag = kept[tag] or {}
  kept[tag] = by_tag
  by_tag[group] = by_tag[group] or setmetatable({}, {
    __index = function(all, name)
      kept_count = kept_count + 1
      local built = build(name)
      all[name] = built
      return built
    end,
  })
  return by_tag[group]
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
function K.summary(tag, id, index) return K.attempt(tag, id, index) .. ':summary' end
function K.stream(tag, id, index) return 'ff:stream:' .. tag .. ':' .. id .. ':' .. index end
function K.stream_meta(tag, id, index) return K.stream(tag, id, index) .. ':meta' end
function K.stream_closed(tag, id, index) return K.stream(tag, id, index) .. ':closed' end
function K.idem(tag, namespace, key) return 'ff:idem:' .. tag .. ':' .. namespace .. ':' .. key end

-- Waiting for answers.
function K.suspension(tag, id) return 'ff:exec:' .. tag .. ':' .. id .. ':suspension:current' end
function K.marks(tag, id) return K.suspension(tag, id) .. ':satisfied_set' end
function K.satisfiers(tag, id) return K.suspension(tag, id) .. ':satisfied_set:signals' end
function K.met(tag, id) return 'ff:exec:' .. tag .. ':' .. id .. ':suspension:met' end
function K.suspend_dedup(tag, id) return 'ff:dedup:suspend:' .. tag .. ':' .. id end
function K.waitpoints(tag, id) return 'ff:exec:' .. tag .. ':' .. id .. ':waitpoints' end
function K.pending_waitpoints(tag, id) return K.waitpoints(tag, id) .. ':pending' end
function K.waitpoint(tag, waitpoint_id) return 'ff:wp:' .. tag .. ':' .. waitpoint_id end
function K.waitpoint_signals(tag, waitpoint_id) return K.waitpoint(tag, waitpoint_id) .. ':signals' end
function K.signals(tag, id) return 'ff:exec:' .. tag .. ':' .. id .. ':signals' end
-- An execution id begins with its tag. Two executions may get signals of the same id.
function K.signal(id, signal_id) return 'ff:signal:' .. id .. ':' .. signal_id end
function K.signal_payload(id, signal_id) return K.signal(id, signal_id) .. ':payload' end
function K.signal_dedup(tag, waitpoint_id, key)
  return 'ff:sigdedup:' .. tag .. ':' .. waitpoint_id .. ':' .. key
end
-- Apart from the keys of token holders, so that none of them can use up an approval's.
function K.approval_dedup(tag, waitpoint_id, key)
  return K.signal_dedup(tag, 'approval', waitpoint_id .. ':' .. key)
end
function K.secrets(tag) return 'ff:sec:' .. tag .. ':waitpoint_hmac' end

local index_tag, index_names
function K.index(tag, name)
  if tag ~= index_tag or kept_count >= KEPT_MAX then
    index_names = names(tag, 1, function(each) return 'ff:idx:' .. tag .. ':' .. each end)
    index_tag = tag
  end
  return index_names[name]
end

local lane_tag, lane_lane, lane_names
function K.lane(tag, lane, name)
  if lane ~= lane_lane or tag ~= lane_tag or kept_count >= KEPT_MAX then
    local prefix = 'ff:idx:' .. tag .. ':lane:' .. K.lane_part(lane) .. ':'
    lane_names = names(tag, lane, function(each) return prefix .. each end)
    lane_tag, lane_lane = tag, lane
  end
  return lane_names[name]
end

function K.eligible(tag, lane, signature)
  if signature == nil or signature == '' then return K.lane(tag, lane, 'eligible') end
  return K.lane(tag, lane, 'eligible:') .. signature
end

function K.reclaimable(tag, lane, signature)
  if signature == nil or signature == '' then return K.lane(tag, lane, 'reclaimable') end
  return K.lane(tag, lane, 'reclaimable:') .. signature
end

local leases_tag, leases_names
function K.worker_leases(tag, instance)
  if tag ~= leases_tag or kept_count >= KEPT_MAX then
    leases_names = names(tag, 2, function(each)
      return 'ff:idx:' .. tag .. ':worker:' .. each .. ':leases'
    end)
    leases_tag = tag
  end
  return leases_names[instance]
end

function K.last_claim(tag, lane, instance) return K.lane(tag, lane, 'claimed:' .. instance) end

local events_tag, events_key
function K.events(tag)
  if tag ~= events_tag then events_tag, events_key = tag, 'ff:part:' .. tag .. ':events' end
  return events_key
end

-- The worker registry; its tag is the namespace.
function K.workers(tag) return 'ff:idx:' .. tag .. ':workers' end
function K.worker_alive(tag, instance) return 'ff:worker:' .. tag .. ':' .. instance .. ':alive' end
function K.worker_record(tag, instance) return 'ff:worker:' .. tag .. ':' .. instance .. ':caps' end
function K.worker_events(tag) return 'ff:worker:' .. tag .. ':events' end

-- Which processes run scanners; the tag is `{scanners}`.
function K.leader(tag, duty) return 'ff:leader:' .. tag .. (duty ~= '' and ':' .. duty or '') end
function K.leaders(tag) return 'ff:leader:' .. tag .. ':duties' end

function K.wake(tag, lane)
  if SETTINGS.cluster then return 'ff:wake:' .. tag end
  return 'ff:wake:' .. lane
end
