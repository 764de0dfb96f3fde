-- ff_record_step: the lease holder records a step of its handler. The first record of a key stays; one
-- that is pending is replaced once, by how the step of the same kind ended.
-- Keys: core, steps.
-- Arguments: execution_id, fence, step_key, kind, status, result flag (0 | 1), result, codec, reason,
--   category, how many ms the step took, fire_at or empty, fires in ms or empty, child or empty.
-- Replies: `recorded`, seq, fire_at or nothing | `already`, the record by position.
-- Errors: execution_not_found, those of the fence, payload_too_large, step_limit_exceeded, corruption.
-- Events: none.
local MAX_RESULT_BYTES = 262144

local function given(value) return value ~= '' and value or nil end

record.register_function('ff_record_step', record.checked_lease, function(c, id, rec, args)
  reply.stop_with(fence.check(c, id, rec, args[2], false, false))
  if #args[7] > MAX_RESULT_BYTES then
    return reply.err('payload_too_large', 'the result is longer than ' .. MAX_RESULT_BYTES .. ' bytes')
  end
  local step_key, kind, status = args[3], args[4], args[5]
  local known, others = steps.find(c, id, step_key)
  if known and not (known[4] == 'pending' and known[3] == kind and status ~= 'pending') then
    return reply.ok('already', known)
  end
  local fires = tonumber(args[12]) or (args[13] ~= '' and c:after(tonumber(args[13])))
    or (known and known[13])
  local seq, problem = steps.store(c, id, {
    step_key = step_key, kind = kind, status = status, codec = given(args[8]),
    result = args[6] == '1' and args[7], reason = given(args[9]), category = given(args[10]),
    attempt_index = record.attempt_index(rec), epoch = record.epoch(rec),
    started_at = known and known[11] or math.max(0, c.now - tonumber(args[11])),
    finished_at = status ~= 'pending' and c.now,
    fire_at = fires, child = given(args[14]) or (known and known[14]),
  }, known and known[1], others)
  if not seq then return problem end
  server.call('HSET', K.core(c.tag, id), 'stepped', '1', 'last_mutation_at', c.now)
  return reply.ok('recorded', seq, fires or false)
end, {})
