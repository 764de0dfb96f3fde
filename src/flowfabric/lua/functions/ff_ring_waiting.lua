-- ff_ring_waiting: ring the doorbell of lanes that hold claimable work, in case a ring was lost.
-- Keys: lane eligible, sigs, reclaimable, config. Arguments: number of lanes, then the
--   lanes, then partition tags.
-- Replies: number of rings. Errors: corruption, where keys of a lane cannot be read; the others are
--   rung all the same. Events: none.
local function ring(c, lane)
  if not c:holds_work(lane) then return 0 end
  c:ring(lane)
  return 1
end

register('ff_ring_waiting', function(_, args)
  local count, rings, problem = tonumber(args[1]), 0, nil
  for t = 2 + count, #args do
    local c = Context.open(args[t])
    for i = 2, 1 + count do
      local ok, answer = try(ring, c, args[i])
      if ok then
        rings = rings + answer
      else
        problem = args[t] .. ': lane ' .. args[i] .. ': ' .. answer
      end
    end
  end
  if problem then return reply.err('corruption', problem) end
  return reply.ok(rings)
end, { 'allow-oom' })
