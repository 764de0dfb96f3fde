-- ff_scan_due: members of time-ordered indexes that are due now. Reads only.
-- On a single server one call may name many partitions; in a cluster each gets its own.
-- Keys: the indexes. Arguments: limit, offset, number of indexes, then their names (after
--   `ff:idx:T:`), then partition tags.
-- Replies: now, then for each index with due members [tag, index name, ids], then for each index
--   where nothing is due yet [tag, index name, earliest score], then for each that cannot be read
--   [tag, index name, why]: it hides nothing of the others. Errors: none.

-- The due ids of an index, or else its earliest score; neither when it is empty.
local function look(key, now, offset, limit)
  local head = server.call('ZRANGE', key, 0, 0, 'WITHSCORES')
  if not head[2] then return nil end
  -- Whatever is stored, a time is answered.
  local earliest = math.min(tonumber(head[2]), clock.END)
  if earliest > now then return nil, earliest end
  return server.call('ZRANGE', key, '-inf', now, 'BYSCORE', 'LIMIT', offset, limit)
end

register('ff_scan_due', function(_, args)
  local now = clock.now()
  local limit, offset, count = args[1], args[2], tonumber(args[3])
  local pages, armed, unreadable = {}, {}, {}
  for t = 4 + count, #args do
    for i = 4, 3 + count do
      local ok, ids, earliest = try(look, K.index(args[t], args[i]), now, offset, limit)
      if not ok then
        unreadable[#unreadable + 1] = { args[t], args[i], ids }
      elseif earliest then
        armed[#armed + 1] = { args[t], args[i], earliest }
      elseif ids and #ids > 0 then
        pages[#pages + 1] = { args[t], args[i], ids }
      end
    end
  end
  return reply.ok(now, pages, armed, unreadable)
end, { 'no-writes' })
