-- ff_ring_waiting: ring the doorbell of lanes that hold claimable work, in case a ring was lost.
-- Keys: lane eligible, sigs, reclaimable. Arguments: number of lanes, lanes, partition tags.
-- Replies: number of rings. Errors: none. Events: none.
register('ff_ring_waiting', function(_, args)
  local count, rings = tonumber(args[1]), 0
  for t = 2 + count, #args do
    local c = Context.open(args[t])
    for i = 2, 1 + count do
      if c:holds_work(args[i]) then
        c:ring(args[i])
        rings = rings + 1
      end
    end
  end
  return reply.ok(rings)
end)
