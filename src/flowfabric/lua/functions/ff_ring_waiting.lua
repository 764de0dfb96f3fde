-- ff_ring_waiting: ring the doorbell of lanes with claimable work, in case a ring was lost.
-- Keys: lane eligible, sigs, reclaimable, config. Arguments: per partition: tag, number of lanes,
--   lanes.
-- Replies: number of lanes rung for. Errors: corruption if keys of a lane cannot be read; the others are
--   rung anyway. Events: none.
register('ff_ring_waiting', function(_, args)
  local rings, problem = 0, nil
  batch.each_place(args, 1, function(tag, lanes)
    local c = Context.open(tag)
    for _, lane in ipairs(lanes) do
      local ok, holds_work = try(waiting.ring_all, c, lane)
      if not ok then problem = tag .. ': lane ' .. lane .. ': ' .. holds_work end
      if ok and holds_work then rings = rings + 1 end
    end
  end)
  if problem then return reply.err('corruption', problem) end
  return reply.ok(rings)
end, { 'allow-oom' })
