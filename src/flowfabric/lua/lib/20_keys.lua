-- Every key name, built from the partition's hash tag (`{fp:N}`) and ids.
-- engine/valkey/keys.py builds the same names; a test compares the two.

K.LANES = 'ff:idx:lanes'

-- `:` separates the parts of a key, so it is escaped in lane names.
function K.lane_part(lane)
  if string.find(lane, '[:%%]') then
    return (string.gsub(lane, '[:%%]', { [':'] = '%3A', ['%'] = '%25' }))
  end
  return lane
end

-- Building a string costs more than most commands, so frequently used names are cached.
local kept, of_partition, of_lane
local KEPT_MAX = 20000

local function forget_names()
  local function building(build)
    return setmetatable({}, { __index = function(all, key)
      if kept >= KEPT_MAX then forget_names() end
      kept = kept + 1
      all[key] = build(key)
      return all[key]
    end })
  end
  kept = 0
  of_partition = building(function(tag)
    return building(function(name) return 'ff:idx:' .. tag .. ':' .. name end)
  end)
  of_lane = building(function(tag)
    return building(function(lane)
      local prefix = 'ff:idx:' .. tag .. ':lane:' .. K.lane_part(lane) .. ':'
      return building(function(name) return prefix .. name end)
    end)
  end)
end

function K.index(tag, name)
  if not kept then forget_names() end
  return of_partition[tag][name]
end

function K.lane(tag, lane, name)
  if not kept then forget_names() end
  return of_lane[tag][lane][name]
end

-- The settings of a lane for the whole deployment; the tag is that of the lane registry.
function K.lane_config(tag, lane) return 'ff:lane:' .. tag .. ':' .. K.lane_part(lane) .. ':config' end

function K.worker_leases(tag, instance)
  return 'ff:idx:' .. tag .. ':worker:' .. instance .. ':leases'
end
function K.last_claim(tag, lane, instance) return K.lane(tag, lane, 'claimed:' .. instance) end

local function by_signature(name)
  local prefix = name .. ':'
  return function(tag, lane, signature)
    if not signature or signature == '' then return K.lane(tag, lane, name) end
    return K.lane(tag, lane, prefix) .. signature
  end
end
K.eligible = by_signature('eligible')
K.reclaimable = by_signature('reclaimable')

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
function K.attempt(tag, id, index) return 'ff:attempt:' .. tag .. ':' .. id .. ':' .. index end
function K.summary(tag, id, index) return K.attempt(tag, id, index) .. ':summary' end
function K.stream(tag, id, index) return 'ff:stream:' .. tag .. ':' .. id .. ':' .. index end
function K.stream_meta(tag, id, index) return K.stream(tag, id, index) .. ':meta' end
function K.stream_closed(tag, id, index) return K.stream(tag, id, index) .. ':closed' end
function K.idem(tag, namespace, key) return 'ff:idem:' .. tag .. ':' .. namespace .. ':' .. key end

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
-- Per execution, because two may get signals with the same id. An execution id begins with its tag.
function K.signal(id, signal_id) return 'ff:signal:' .. id .. ':' .. signal_id end
function K.signal_payload(id, signal_id) return K.signal(id, signal_id) .. ':payload' end
function K.signal_dedup(tag, waitpoint_id, key)
  return 'ff:sigdedup:' .. tag .. ':' .. waitpoint_id .. ':' .. key
end
-- Separate, so that a token holder cannot use up an approval's key.
function K.approval_dedup(tag, waitpoint_id, key)
  return K.signal_dedup(tag, 'approval', waitpoint_id .. ':' .. key)
end
function K.secrets(tag) return 'ff:sec:' .. tag .. ':waitpoint_hmac' end

-- A flow shares the hash tag of its members.
function K.flow(tag, flow_id) return 'ff:flow:' .. tag .. ':' .. flow_id .. ':core' end
function K.members(tag, flow_id) return 'ff:flow:' .. tag .. ':' .. flow_id .. ':members' end
function K.member_ids(tag, flow_id) return 'ff:flow:' .. tag .. ':' .. flow_id .. ':member_ids' end
function K.flow_tags(tag, flow_id) return 'ff:flow:' .. tag .. ':' .. flow_id .. ':tags' end
function K.edges(tag, flow_id) return 'ff:flow:' .. tag .. ':' .. flow_id .. ':edges' end
function K.held(tag, flow_id) return 'ff:flow:' .. tag .. ':' .. flow_id .. ':held' end
function K.exits(tag, flow_id) return 'ff:flow:' .. tag .. ':' .. flow_id .. ':exits' end
function K.out(tag, flow_id, id) return 'ff:flow:' .. tag .. ':' .. flow_id .. ':out:' .. id end
function K.into(tag, flow_id, id) return 'ff:flow:' .. tag .. ':' .. flow_id .. ':in:' .. id end

K.events = values.memo(function(tag) return 'ff:part:' .. tag .. ':events' end)

-- A budget; its tag is `{b:M}`. The execution ids in the names of its ledgers have a later tag.
function K.budget(tag, budget_id) return 'ff:budget:' .. tag .. ':' .. budget_id end
function K.budget_part(tag, budget_id, part) return K.budget(tag, budget_id) .. ':' .. part end
function K.ledger(tag, budget_id, id) return K.budget_part(tag, budget_id, 'by_exec:') .. id end
function K.usage_mark(tag, budget_id, key)
  return 'ff:usagededup:' .. tag .. ':' .. budget_id .. ':' .. key
end
function K.settled(tag, budget_id, reservation_id)
  return 'ff:settled:' .. tag .. ':' .. budget_id .. ':' .. reservation_id
end

-- What a subscription group has processed of a partition's feed, and who reads it.
function K.group(tag, group) return 'ff:part:' .. tag .. ':sub:' .. group end
function K.group_members(tag, group) return 'ff:part:' .. tag .. ':members:' .. group end
function K.group_start(tag, group) return 'ff:part:' .. tag .. ':start:' .. group end

-- A quota policy; its tag is `{q:K}`.
function K.quota(tag, id) return 'ff:quota:' .. tag .. ':' .. id end
function K.quota_window(tag, id) return K.quota(tag, id) .. ':window:requests_per_window' end
function K.quota_guards(tag, id) return K.quota(tag, id) .. ':guards' end
function K.quota_slots(tag, id) return K.quota(tag, id) .. ':admitted_set' end
function K.quota_blocked(tag, id) return K.quota(tag, id) .. ':blocked' end

-- The worker registry; its tag is the namespace.
function K.workers(tag) return 'ff:idx:' .. tag .. ':workers' end
-- Processes that are being drained, with the time at which their leases are revoked.
function K.drains(tag) return 'ff:idx:' .. tag .. ':drains' end
function K.worker_alive(tag, instance) return 'ff:worker:' .. tag .. ':' .. instance .. ':alive' end
function K.worker_record(tag, instance) return 'ff:worker:' .. tag .. ':' .. instance .. ':caps' end
function K.worker_events(tag) return 'ff:worker:' .. tag .. ':events' end

-- Which processes run scanners; the tag is `{scanners}`.
function K.leader(tag, duty) return 'ff:leader:' .. tag .. (duty ~= '' and ':' .. duty or '') end
function K.leaders(tag) return 'ff:leader:' .. tag .. ':duties' end

-- The bell of work of a lane with a signature; that of the lane is its name, without control
-- characters.
K.BELL_MARK = '\31'
function K.bell(lane, signature) return lane .. K.BELL_MARK .. signature end

-- In a cluster: where all listeners are called, and where one of them is woken.
function K.wake(tag, bell)
  if SETTINGS.cluster then return 'ff:wake:' .. tag end
  return 'ff:wake:' .. bell
end
function K.own_wake(tag, listener) return 'ff:wake:' .. tag .. ':' .. listener end

-- On a single server: the bells with a signature, who listens to bells, and where a listener hears of
-- new ones.
K.BELLS = 'ff:idx:bells'
K.LISTENERS = 'ff:idx:listeners'
function K.ear(listener) return 'ff:wake:' .. K.BELL_MARK .. listener end
