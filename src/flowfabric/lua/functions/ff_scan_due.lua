-- ff_scan_due: members of time-ordered indexes that are due now. Reads only.
-- On a single server one call may name many partitions; in a cluster each gets its own.
-- Keys: the indexes. Arguments: limit, offset, then per partition: tag, number of indexes, their
--   names (after `ff:idx:T:`).
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
  local limit, offset = args[1], args[2]
  local at = 3
  local pages, armed, unreadable = {}, {}, {}
  while at <= #args do
    local tag, last = args[at], at + 1 + tonumber(args[at + 1])
    for i = at + 2, last do
      -- The names are built here, because so many would push out those that are kept.
      local key = K.index(tag, '') .. args[i]
      local ok, ids, earliest = try(look, key, now, offset, limit)
      if not ok then
        unreadable[#unreadable + 1] = { tag, args[i], ids }
      elseif earliest then
        armed[#armed + 1] = { tag, args[i], earliest }
      elseif ids and #ids > 0 then
        pages[#pages + 1] = { tag, args[i], ids }
      end
    end
    at = last + 1
  end
  return reply.ok(now, pages, armed, unreadable)
end, { 'no-writes' })
