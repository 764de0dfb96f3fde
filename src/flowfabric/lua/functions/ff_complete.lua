-- ff_complete: the lease holder ends attempts, successfully or not; optionally claims the next ones.
-- Keys: core, result, lane active, lane terminal, lease_expiry, worker leases, timers.
-- Arguments: number of items, then per item: execution_id, fence, source (an override:
--   `operator_override <request id>`), result (`0` none, or `1` followed by the encoding label),
--   result bytes; of a failure `2` followed by the category, and the reason; then optionally the
--   claim arguments.
-- Replies per item: `completed` | [1, what ff_fail replies] | [0, code, detail...]; then what
--   ff_claim_many replies, if asked, with what the call did for other members before those that need
--   admission.
-- Errors: execution_not_found and those of the fence; of the whole call: batch_too_large.
-- Events: completion, released (a retry), expired (a lapsed lease), acquired and reclaimed (the
--   claims).
local FAILURE = 50

local function success(label, source)
  return {
    outcome = 's', reason = 'completed', stream_reason = 'attempt_success', source = source,
    fields = #label > 1 and { 'result_encoding', string.sub(label, 2) } or nil,
  }
end
local holder_success = values.memo(success)

local function fail(c, id, text, category, reason)
  local rec = record.checked_lease(c, id)
  if not rec then return reply.err('execution_not_found') end
  local problem, did, due, next_index = retry.fail(c, id, rec, text, reason, category)
  return problem or { 1, did, due, next_index }
end

local function complete(c, id, text, source, label, result)
  if string.byte(label) == FAILURE then return fail(c, id, text, string.sub(label, 2), result) end
  local rec = record.read(c, id)
  if not rec then return reply.err('execution_not_found') end
  local request, answered
  if source ~= 'lease_holder' then request, answered = operator.override(rec, source) end
  if answered then return 'completed' end
  local problem = fence.check(c, id, rec, text, request, true)
  if problem then
    local own = fence.own_attempt(c, id, rec, text)
    return own and own.state == 'ended_success' and 'completed' or problem
  end
  local how = request and success(label, 'operator_override') or holder_success(label)
  how.result = label ~= '0' and result or nil
  ending.finish(c, id, rec, how)
  how.result = nil
  c.ended = true
  operator.remember(c, id, rec, request, 'completed')
  return 'completed'
end

register('ff_complete', function(keys, args)
  local count = tonumber(args[1])
  local problem = batch.excess(args, count)
  if problem then return problem end
  local first = 5 * count + 2
  local c = Context.open(keys[1], count > 1 or (args[first + 4] or '1') ~= '1')
  local want = args[first] and claiming.wanted(args, first)
  -- What the ends release is claimed here first: only what is left wakes other workers.
  local released = want and {}
  c.rings_later = released
  if want then claiming.begin_keeping(c, want) end
  local replies = {}
  for n = 1, count do
    local i = 5 * n - 3
    replies[n] = reply.guarded(complete, c, args[i], args[i + 1], args[i + 2], args[i + 3],
      args[i + 4])
  end
  if not want then
    c:close()
    return reply.ok(replies, cascade.told(c))
  end
  c:flush()
  want.awake = true
  local ok, rows, left, unknown = pcall(claiming.many, c, want)
  if not ok then left = claiming.give_kept(c) end
  -- The end of a flow may release members of the flow that it belongs to: they are for all workers.
  c.kept, c.rings_later = nil, nil
  c:close()
  for _, bell in pairs(released) do
    if left ~= 0 or bell.lane ~= want.lane then c:ring(bell.lane, bell.signature) end
  end
  if not ok then error(rows, 0) end
  return reply.ok(replies, rows, left, unknown or false, cascade.told(c) or false, want.needing)
end, { 'allow-oom' })
