-- ff_scan_due: members of time-ordered indexes that are due now. Reads only.
-- On a single server one call may name many partitions; in a cluster each gets its own.
-- Keys: the indexes. Arguments: limit, offset, number of indexes, index names (after `ff:idx:T:`),
--   then partition tags.
-- Replies: now, then for each index with due members [tag, index name, ids], then for each index
--   where nothing is due yet [tag, index name, earliest score]. Errors: none.
server.register_function({
  function_name = 'ff_scan_due',
  flags = { 'no-writes' },
  callback = function(_, args)
    local now = clock.now()
    local limit, offset, count = args[1], args[2], tonumber(args[3])
    local pages, armed = {}, {}
    for t = 4 + count, #args do
      for i = 4, 3 + count do
        local key = K.index(args[t], args[i])
        local head = server.call('ZRANGE', key, 0, 0, 'WITHSCORES')
        if head[2] and tonumber(head[2]) > now then
          armed[#armed + 1] = { args[t], args[i], tonumber(head[2]) }
        elseif head[2] then
          local ids = server.call('ZRANGE', key, '-inf', now, 'BYSCORE', 'LIMIT', offset, limit)
          if #ids > 0 then pages[#pages + 1] = { args[t], args[i], ids } end
        end
      end
    end
    return reply.ok(now, pages, armed)
  end,
})
