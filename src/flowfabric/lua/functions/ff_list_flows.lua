-- ff_list_flows: a page of the flows of a partition, by id. Entries without a flow leave the index.
-- Keys: flow_index, flow core, flow tags. Arguments: id of the last flow of the page before or empty,
--   limit, how many entries to look at, namespace or empty, then per tag: name, value.
-- Replies: a list of [flow_id, flat record]; the last id looked at, empty at the end.
-- Errors: none. Events: none.
local function has_tags(tag, flow_id, args)
  for i = 5, #args, 2 do
    if server.call('HGET', K.flow_tags(tag, flow_id), args[i]) ~= args[i + 1] then return false end
  end
  return true
end

register('ff_list_flows', function(keys, args)
  local tag, limit, most, rows = keys[1], tonumber(args[2]), tonumber(args[3]), {}
  local index = K.index(tag, 'flow_index')
  local first = args[1] == '' and '-' or '(' .. args[1]
  local ids = server.call('ZRANGE', index, first, '+', 'BYLEX', 'LIMIT', 0, most)
  for i, flow_id in ipairs(ids) do
    if #rows >= limit then return reply.ok(rows, ids[i - 1]) end
    local ok, flat = try(server.call, 'HGETALL', K.flow(tag, flow_id))
    if ok and #flat == 0 then
      server.call('ZREM', index, flow_id)
    elseif not ok then
      rows[#rows + 1] = { flow_id, { 'unreadable', '1' } }
    else
      local f = values.fields(flat, { namespace = 'default' })
      if flow.is_shown(f) and (args[4] == '' or f.namespace == args[4])
          and has_tags(tag, flow_id, args) then
        rows[#rows + 1] = { flow_id, flat }
      end
    end
  end
  return reply.ok(rows, #ids == most and ids[#ids] or '')
end, { 'allow-oom' })
