-- ff_scan_due: members of time-ordered indexes that are due now.
-- On a single server one call may name many partitions; in a cluster each gets its own.
-- Keys: the indexes. Arguments: limit, offset, then per partition: tag, number of indexes, their
--   names (after `ff:idx:T:`).
-- Replies: now, then for each index with due members [tag, index name, ids], then for each index
--   where nothing is due yet [tag, index name, earliest score], then for each that cannot be read
--   [tag, index name, why]. Errors: none.

-- The due ids of an index, or nil and its earliest score; neither if it is empty.
local function look(key, now, offset, limit)
  local head = server.call('ZRANGE', key, 0, 0, 'WITHSCORES')
  if not head[2] then return nil end
  -- The answer is always a valid time.
  local earliest = math.min(tonumber(head[2]), clock.END)
  if earliest > now then return nil, earliest end
  return server.call('ZRANGE', key, '-inf', now, 'BYSCORE', 'LIMIT', offset, limit)
end

register('ff_scan_due', function(_, args)
  local now, limit, offset = clock.now(), args[1], args[2]
  local pages, armed, unreadable = {}, {}, {}
  batch.each_place(args, 3, function(tag, names)
    for _, name in ipairs(names) do
      -- Built here: so many names would displace those that are kept.
      local ok, ids, earliest = try(look, K.index(tag, '') .. name, now, offset, limit)
      if not ok then
        unreadable[#unreadable + 1] = { tag, name, ids }
      elseif earliest then
        armed[#armed + 1] = { tag, name, earliest }
      elseif ids and #ids > 0 then
        pages[#pages + 1] = { tag, name, ids }
      end
    end
  end)
  return reply.ok(now, pages, armed, unreadable)
end, { 'no-writes' })
