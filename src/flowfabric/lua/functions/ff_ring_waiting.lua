-- ff_ring_waiting: ring the doorbell of lanes that hold claimable work, in case a ring was lost.
-- Keys: lane eligible, sigs, reclaimable. Arguments: number of lanes, lanes, partition tags.
-- Replies: number of rings. Errors: none. Events: none.
-- A paused lane gives nothing out: waking workers for it would only cost.
local YIELDS_NOTHING = { paused = true, disabled = true }

local function waiting_work(c, lane)
  return server.call('EXISTS', K.eligible(c.tag, lane), K.lane(c.tag, lane, 'reclaimable'),
    K.lane(c.tag, lane, 'sigs')) > 0 and not YIELDS_NOTHING[c:lane(lane).state]
end

server.register_function('ff_ring_waiting', function(_, args)
  local count, rings = tonumber(args[1]), 0
  for t = 2 + count, #args do
    local c = Context.open(args[t])
    for i = 2, 1 + count do
      if waiting_work(c, args[i]) then
        c:ring(args[i])
        rings = rings + 1
      end
    end
  end
  return reply.ok(rings)
end)
