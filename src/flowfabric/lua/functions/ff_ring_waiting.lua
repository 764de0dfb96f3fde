-- ff_ring_waiting: ring the doorbell of lanes that hold claimable work, in case a ring was lost.
-- Keys: lane eligible, sigs, reclaimable, config. Arguments: per partition: tag, number of lanes,
--   lanes.
-- Replies: number of rings. Errors: corruption, where keys of a lane cannot be read; the others are
--   rung all the same. Events: none.
local function ring(c, lane)
  if not c:holds_work(lane) then return 0 end
  c:ring(lane)
  return 1
end

register('ff_ring_waiting', function(_, args)
  local rings, problem = 0, nil
  local at = 1
  while at <= #args do
    local c, last = Context.open(args[at]), at + 1 + tonumber(args[at + 1])
    for i = at + 2, last do
      local ok, answer = try(ring, c, args[i])
      if ok then
        rings = rings + answer
      else
        problem = args[at] .. ': lane ' .. args[i] .. ': ' .. answer
      end
    end
    at = last + 1
  end
  if problem then return reply.err('corruption', problem) end
  return reply.ok(rings)
end, { 'allow-oom' })
