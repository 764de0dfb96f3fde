-- Finding claimable executions of a lane and turning them into leases.

-- Executions that cannot be claimed now (a live grant, a grace period, an unreadable record) must
-- not hide those after them: a claim looks this much further.
local LOOK_AHEAD = 16
-- A claim stops once its payloads and tags have this many bytes.
local MAX_BYTES = 4194304
local DEFAULT_RECLAIM_CAP = 1000
-- How many requests a worker process may have under way, and how much of each request's id is
-- kept. A chance match finds no leases of the request.
local REMEMBERED = 128
local TRACE = 8

local NONE = {}
-- Instead of the number left: the worker is being drained and gets nothing.
local REFUSED = -1

function claiming.mode(c, rec)
  if rec.state == S.NEW then return 'fresh' end
  if S.is_runnable(rec.state) and S.is_eligible(rec.state) then
    return S.has_paused_attempt(rec.state) and 'resumed' or 'fresh'
  end
  if S.is_lease_revoked(rec.state) then return 'reclaimed' end
  if S.is_lease_expired(rec.state) then
    local grace = c:lane(rec.lane_id).reclaim_grace
    if tonumber(rec.lease_expires_at) + grace <= c.now then return 'reclaimed' end
  end
end

function claiming.reclaim_cap(rec, fallback)
  return tonumber(rec.max_reclaim_count or fallback or DEFAULT_RECLAIM_CAP)
end

-- The error if an execution has no lost lease to reclaim, or nil. One that ended at its cap says so
-- again; a caller's own cap is not on the record, but the count had reached it.
function claiming.reclaim_problem(c, rec, worker, fallback)
  if S.is_terminal(rec.state) and rec.ended_by == 'reclaim_cap' then
    local cap = math.min(claiming.reclaim_cap(rec, fallback), tonumber(rec.lease_reclaim_count or 0))
    return reply.err('max_retries_exhausted', values.text(cap))
  end
  if not S.is_lease_lost(rec.state) or c:is_closed(rec.lane_id) or workers.is_drained(c, worker, rec) then
    return reply.err('execution_not_reclaimable')
  end
end

local function end_at_cap(c, id, rec, fallback)
  local cap = claiming.reclaim_cap(rec, fallback)
  if tonumber(rec.lease_reclaim_count or 0) < cap then return nil end
  -- The category of an earlier failure did not end the execution.
  record.clear(c, id, rec, 'failure_category')
  ending.finish(c, id, rec, {
    outcome = 'f', reason = 'max_reclaims_exceeded', stream_reason = 'max_reclaims_exceeded',
    fields = { 'failure_reason', 'max_reclaims_exceeded', 'ended_by', 'reclaim_cap' },
  })
  return cap
end

function claiming.cap_problem(c, id, rec, fallback)
  local cap = end_at_cap(c, id, rec, fallback)
  return cap and reply.err('max_retries_exhausted', values.text(cap))
end

-- Ends a member of a cancelled flow instead of handing it out; nil if it may run.
function claiming.ends_with_flow(c, id, rec, mode)
  local f = rec.flow_id and flow.ending_member(c, rec, mode == 'resumed')
  if not f then return nil end
  ending.cancel(c, id, rec, 'flow_cascade', f.cancel_reason)
  return true
end

function claiming.take(c, id, rec, mode, grant)
  if mode == 'reclaimed' then
    record.archive(c, id, rec, 'interrupted_reclaimed', {
      failure_reason = S.is_lease_revoked(rec.state) and 'lease_revoked' or 'lease_expired',
    })
    streams.close(c, id, rec, 'reclaimed')
    lease.leave_indexes(c, id, rec, true)
  else
    waiting.leave(c, id, rec)
  end
  local suspended = rec.paused and string.sub(rec.paused, 1, 8) == 'suspend:'
  lease.open(c, id, rec, mode, grant)
  if suspended then
    server.call('HSET', K.suspension(c.tag, id), 'claimed_epoch', record.epoch(rec))
  end
end

local MODE_LETTERS = { fresh = 'f', resumed = 'r', reclaimed = 'c' }

-- What most claims lack: attempt type, tags, namespace, ms left of the attempt's time, deadline of
-- the execution, why it was resumed, flow, inputs, quota policy, number of the run, steps. Callers
-- ignore further parts, here and in the row. An execution that has steps was run before, so it is no
-- plain one.
local function optional_parts(c, id, rec, mode)
  if not (rec.attempt_type or rec.tagged or rec.attempt_timeout_ms or rec.execution_deadline_at
      or rec.flow_id or rec.quota_policy_id) and rec.namespace == 'default'
      and mode ~= 'resumed' then
    return nil
  end
  local left = rec.time_left
  if rec.attempt_timeout_ms and not left then
    -- The repeated answer of an earlier call.
    local timer = server.call('ZSCORE', K.index(c.tag, 'attempt_timeout'), id)
    left = timer and math.max(1, tonumber(timer) - c.now)
  end
  return {
    rec.attempt_type or false,
    rec.tagged and server.call('HGETALL', K.tags(c.tag, id)) or false,
    rec.namespace ~= 'default' and rec.namespace or false,
    left or false,
    tonumber(rec.execution_deadline_at) or false,
    mode == 'resumed' and suspension.cause(c, id, rec) or false,
    rec.flow_id or false,
    rec.named and edges.claimed_inputs(c, id, rec) or false,
    rec.quota_policy_id or false,
    rec.quota_policy_id and admission.run(rec) or false,
    rec.stepped and steps.claimed_page(c, id) or false,
  }
end

-- Everything a worker needs to run the claimed attempt, by position; then since when it could be
-- claimed.
function claiming.row(c, id, rec, mode)
  return {
    id, MODE_LETTERS[mode], rec.execution_kind, rec.lease, rec.attempt,
    record.payload(c, id, rec), rec.payload_encoding or false,
    tonumber(rec.lease_expires_at), optional_parts(c, id, rec, mode) or false,
    rec.last_transition_at or rec.created_at,
  }
end

-- Four hex digits that turn a request's prefixes into the ids of one claim.
local suffix_of = values.memo(function(number) return string.format('%04x', number) end)

-- The claims of an earlier call with the same request whose leases are still live, in order.
local function replayed(c, want)
  local found = {}
  local leases = K.worker_leases(c.tag, record.instance_of(want.worker))
  for _, id in ipairs(server.call('SMEMBERS', leases)) do
    local readable, rec = try(record.read, c, id)
    if readable and rec and rec.state == S.ACTIVE and tonumber(rec.lease_expires_at) > c.now
        and string.sub(rec.lease, 1, 32) == want.lease_prefix then
      found[#found + 1] = { id = id, rec = rec }
    end
  end
  table.sort(found, function(a, b) return a.rec.lease < b.rec.lease end)
  local rows = {}
  for i, each in ipairs(found) do
    local rec = each.rec
    local mode = rec.attempt_type == 'reclaim' and not rec.resumed_at and 'reclaimed'
      or rec.resumed_at and 'resumed' or 'fresh'
    rows[i] = claiming.row(c, each.id, rec, mode)
  end
  return rows
end

-- Leaves an execution whose task this worker does not know to workers that know it, also after
-- retries, pauses and replays.
function claiming.leave_to_others(c, id, rec, worker, key)
  c:zrem(key, id)
  c:release_signature(rec.lane_id, waiting.signature(rec))
  record.set(c, id, rec, 'offered_to', record.instance_of(worker))
  waiting.offer(c, id, rec, S.is_runnable(rec.state) and K.eligible or K.reclaimable)
  waiting.ring(c, rec)
end

-- Claims one candidate if possible. True if it cannot be claimed now and stays in its index.
local function consider(c, want, offered, id, key, rows, rec)
  rec = rec or record.read(c, id)
  -- A new execution without a time limit has no other field that a claim computes with.
  if rec and (rec.state ~= S.NEW or rec.attempt_timeout_ms) then record.check(id, rec) end
  local mode = rec and claiming.mode(c, rec)
  if not mode then
    -- A lost execution in its lane's grace period stays; anything else does not belong here.
    if rec and S.is_lease_expired(rec.state) then return true end
    c:zrem(key, id)
    return false
  end
  if (rec.grant_expires_at and tonumber(rec.grant_expires_at) >= c.now)
      or not offers.takes(offered, rec) then
    return true
  end
  if claiming.ends_with_flow(c, id, rec, mode) then return false end
  if offered.no_other_tasks and not offered.tokens[waiting.task_token(rec.execution_kind)] then
    claiming.leave_to_others(c, id, rec, want.worker, key)
    -- It left its index, so a further look finds others: together they stay within the limit.
    want.most_looked = want.most_looked - 1
    want.unknown, want.named = want.unknown or {}, want.named or {}
    if not want.named[rec.execution_kind] then
      want.named[rec.execution_kind] = true
      table.insert(want.unknown, rec.execution_kind)
    end
    return false
  end
  if mode == 'reclaimed' then
    if end_at_cap(c, id, rec) then return false end
  elseif admission.defers(c, want, id, rec) then
    return true
  end
  want.suffix = suffix_of(#rows)
  claiming.take(c, id, rec, mode, want)
  local row = claiming.row(c, id, rec, mode)
  rows[#rows + 1] = row
  want.bytes = want.bytes + (row[6] and #row[6] or 0) + (tonumber(rec.tagged) or 0)
  if want.bytes >= MAX_BYTES then want.max = #rows end
end

-- Considers the best candidates, `limit` of each index. Namespaces take turns; a turn is one lease or
-- one candidate for admission. Returns how many claimable ones are left in indexes seen whole, the
-- indexes that may hold more, and how many of each cannot be claimed now.
local function look(c, want, offered, limit, rows)
  local queues, crowded = offers.candidates(c, want, offered, limit)
  local left, stuck, turn = 0, {}, 1
  while #rows < want.max and queues[turn] do
    local queue, room = queues[turn], want.max - #rows
    local at = queue.at + 1
    local id, key = queue.ids[at], queue.keys[at] or queue.key
    queue.at = at
    if not id then
      table.remove(queues, turn)
    else
      -- An unreadable record stays, too.
      local ok, stays = try(consider, c, want, offered, id, key, rows)
      if not ok or stays then stuck[key] = (stuck[key] or 0) + 1 end
      -- Unseen ones of this index may be better than the following: look further first, or leave
      -- the rest to the next claim.
      if crowded[key] == at and #rows < want.max and (limit < want.most_looked or #rows > 0) then
        return left, crowded, stuck
      end
      if want.max - #rows < room and queue.namespace then
        offers.served(c, want, queue.namespace)
        turn = turn + 1
      end
    end
    if turn > #queues then turn = 1 end
  end
  for _, queue in ipairs(queues) do
    for at = queue.at + 1, #queue.ids do
      local key = queue.keys[at] or queue.key
      if not crowded[key] then
        left = left + 1
        if not want.plain then want.rest[key] = true end
      end
    end
  end
  return left, crowded, stuck
end

-- Has this call keep members that its completions release: the claim that follows takes them
-- without a detour through the index.
function claiming.begin_keeping(c, want)
  local offered = offers.of(want.capabilities)
  c.kept, c.claimer = { lane = want.lane, max = want.max, offered = offered }, offered
end

-- Keeps a released member for the claim of this call, if that may take it; `...` are fields for its
-- record. It is stored when it is taken or given to others; until then, `record.read` knows it.
function claiming.keep(c, id, rec, ...)
  local kept = c.kept
  if not kept or #kept >= kept.max or rec.lane_id ~= kept.lane
      or not offers.takes(kept.offered, rec) or admission.is_needed(rec)
      or (kept.offered.no_other_tasks
        and not kept.offered.tokens[waiting.task_token(rec.execution_kind)]) then
    return false
  end
  record.move_later(rec, S.NEW, ...)
  kept[#kept + 1] = id
  c.at_hand = c.at_hand or {}
  c.at_hand[id] = rec
  return true
end

-- Gives what was kept and not taken to all workers; returns how many.
function claiming.give_kept(c)
  local given = 0
  for _, id in ipairs(c.kept or NONE) do
    local rec = c.at_hand[id]
    -- Another completion of this call may have ended it.
    if rec.state == S.NEW then
      record.transition(c, id, rec, S.NEW)
      waiting.enter(c, id, rec)
      waiting.ring(c, rec)
      given = given + 1
    end
  end
  c.kept = nil
  if given > 0 then c:flush() end
  return given
end

local function hand_over(c, want, id, rec, rows)
  want.suffix = suffix_of(#rows)
  lease.open(c, id, rec, 'fresh', want)
  local row = claiming.row(c, id, rec, 'fresh')
  rows[#rows + 1], want.bytes = row, want.bytes + #(row[6] or '') + (tonumber(rec.tagged) or 0)
end

-- Turns what was kept into leases, as far as nothing better waits; true if nothing is left to claim.
local function take_kept(c, want, rows)
  local kept, tag, lane = c.kept, c.tag, want.lane
  if not kept or #kept == 0 then return false end
  -- Usually none of these exists, and one command tells it.
  local found = server.call('EXISTS', K.eligible(tag, lane), K.reclaimable(tag, lane),
    K.lane(tag, lane, 'sigs'), K.lane(tag, lane, 'config'), K.index(tag, 'draining'))
  local best = found == 1 and server.call('ZRANGE', K.eligible(tag, lane), 0, 0, 'WITHSCORES') or NONE
  if found > #best / 2 then
    claiming.give_kept(c)
    return false
  end
  want.plain, c.lanes[lane] = true, Context.DEFAULTS
  for _, id in ipairs(kept) do
    local rec = c.at_hand[id]
    if rec.state == S.NEW and want.bytes < MAX_BYTES
        and (not best[1] or tonumber(c:score(rec)) <= tonumber(best[2])) then
      try(hand_over, c, want, id, rec, rows)
    end
  end
  return claiming.give_kept(c) == 0 and not best[1]
end

-- Wakes others for what a claim left.
local function ring_for_rest(c, want, crowded)
  if want.plain then return c:ring(want.lane) end
  for key in pairs(crowded) do want.rest[key] = true end
  for key in pairs(want.rest) do c:ring(want.lane, want.signature_in[key]) end
end

local function trace_of(want) return string.sub(want.lease_prefix, 1, TRACE) end

-- What an earlier call with the same request claimed; nil if this is the first. A call that ended
-- something is the first. A call that should have ended something and did not may be a repeat: only
-- the worker's leases tell.
local function earlier(c, want)
  if c.ended then return nil end
  if want.awake then
    local rows = replayed(c, want)
    return #rows > 0 and rows or nil
  end
  want.memo = K.last_claim(c.tag, want.lane, record.instance_of(want.worker))
  want.known = server.call('GET', want.memo) or ''
  return string.find(want.known, trace_of(want), 1, true) and replayed(c, want)
end

-- Has a repeat of the request find what this call claimed.
local function remember(want, rows)
  if #rows > 0 and want.memo then
    -- Latest request first. The worker's leases tell what each claimed.
    local older = string.sub(want.known, 1, (REMEMBERED - 1) * TRACE)
    server.call('SET', want.memo, trace_of(want) .. older, 'PX', want.ttl)
  end
end

-- Claims one execution if its next run is the one that was admitted.
local function consider_admitted(c, want, offered, id, run, rows)
  local rec = record.read(c, id)
  if rec and rec.lane_id == want.lane and admission.run(rec) + 1 == run then
    consider(c, want, offered, id, K.eligible(c.tag, want.lane, waiting.signature(rec)), rows, rec)
  end
end

-- Claims up to want.max of these executions, if their next runs are those that the scheduler
-- admitted; a repeated request gets the same.
function claiming.admitted(c, want, ids, runs)
  local again = earlier(c, want)
  if again then return again end
  local offered, rows = offers.undrained(c, want, offers.of(want.capabilities)), {}
  want.admitted = true
  for i, id in ipairs(offered and not c:is_closed(want.lane) and ids or NONE) do
    if #rows < want.max then try(consider_admitted, c, want, offered, id, runs[i], rows) end
  end
  c:flush()
  remember(want, rows)
  return rows
end

-- Claims up to want.max executions; a repeated request gets the same. Returns rows, number left, and
-- the tasks that were left to others, if any. Those in want.needing need admission first.
function claiming.many(c, want)
  local offered, again = offers.of(want.capabilities), earlier(c, want)
  if again then
    claiming.give_kept(c)
    return again, c:holds_work(want.lane) and 1 or 0
  end
  local rows, left, crowded, stuck = {}, 0, NONE, NONE
  if not take_kept(c, want, rows) then
    if want.plain == nil then offered, want.plain = offers.opened(c, want, offered) end
    if not offered then return NONE, REFUSED end
    if c:is_closed(want.lane) then return NONE, 0 end
    local limit = want.max - #rows
    if limit == 0 then
      left = server.call('ZCARD', K.eligible(c.tag, want.lane))
    else
      left, crowded, stuck = look(c, want, offered, limit, rows)
    end
    while #rows < want.max and next(crowded) and limit < want.most_looked do
      c:flush()
      limit = math.max(limit + 1, math.min(2 * limit + LOOK_AHEAD, want.most_looked))
      left, crowded, stuck = look(c, want, offered, limit, rows)
    end
  end
  c:flush()
  remember(want, rows)
  for key in pairs(crowded) do left = left + server.call('ZCARD', key) - (stuck[key] or 0) end
  if left == 0 and want.unseen then left = 1 end
  -- A worker that claims while it ends attempts was awake before; others were woken then.
  if left > 0 and (#rows > 0 or want.needing) and not want.awake then ring_for_rest(c, want, crowded) end
  return rows, left, want.unknown
end

-- The claim arguments from `first` on.
function claiming.wanted(args, first)
  return {
    lane = args[first], worker = args[first + 1], capabilities = args[first + 2],
    ttl = tonumber(args[first + 3]), max = tonumber(args[first + 4]),
    lease_prefix = args[first + 5], attempt_prefix = args[first + 6],
    most_looked = offers.MAX_LOOKED, bytes = 0, plain = nil, suffix = nil, awake = nil, unknown = nil,
    spaces = nil, unseen = nil, rest = nil, memo = nil, known = nil, needing = nil, admitted = nil,
  }
end
