-- ff_idle_lanes: the lanes for which a partition stores nothing.
-- Keys: every lane index. Arguments: any number of lanes. Replies: those without an index. Errors: none.
register('ff_idle_lanes', function(keys, args)
  local idle = {}
  for i = 1, #args do
    local names = {}
    indexes.add_lane(names, keys[1], args[i])
    if server.call('EXISTS', unpack(names)) == 0 then idle[#idle + 1] = args[i] end
  end
  return reply.ok(idle)
end, { 'no-writes' })
