-- ff_complete: the lease holder ends executions successfully; optionally claims the next ones.
-- Keys: core, result, lane active, lane terminal, lease_expiry, worker leases, timers.
-- Arguments: number of items, then per item: execution_id, fence, source, result (`0` none, or
--   `1` followed by the encoding label), result bytes; then optionally the claim arguments.
-- Replies per item: `completed` | [0, code, detail...]; then claim rows and number left, if asked.
-- Errors: execution_not_found and those of the fence. Events: completion.
local function complete(c, id, text, source, label, result)
  local rec = record.read(c, id)
  if not rec then return reply.err('execution_not_found') end
  local problem = fence.check(c, id, rec, text, source == 'operator_override', true)
  if problem then
    local own = fence.own_attempt(c, id, rec, text)
    if own and own.state == 'ended_success' then return 'completed' end
    return problem
  end
  local stored = string.sub(label, 1, 1) == '1'
  local fields
  if stored then
    server.call('SET', K.result(c.tag, id), result)
    if #label > 1 then fields = { 'result_encoding', string.sub(label, 2) } end
  end
  ending.finish(c, id, rec, {
    outcome = 's', reason = 'completed', fields = fields, has_result = stored,
    stream_reason = 'attempt_success',
    source = source == 'operator_override' and source or nil,
  })
  return 'completed'
end

server.register_function('ff_complete', function(keys, args)
  local c = Context.open(keys[1])
  local count = tonumber(args[1])
  local replies = {}
  for n = 1, count do
    local i = 5 * n - 3
    replies[n] = reply.guarded(complete, c, args[i], args[i + 1], args[i + 2], args[i + 3],
      args[i + 4])
  end
  c:flush()
  local first = 5 * count + 2
  if not args[first] then return reply.ok(replies) end
  local want = claiming.wanted(args, first)
  want.awake = true
  local rows, left = claiming.many(c, want)
  return reply.ok(replies, rows, left)
end)
