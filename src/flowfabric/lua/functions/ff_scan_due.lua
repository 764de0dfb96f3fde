-- ff_scan_due: members of time-ordered indexes that are due now. Reads only.
-- On a single server one call may name many partitions; in a cluster each gets its own.
-- Keys: the indexes. Arguments: limit, offset, number of indexes, index names (after `ff:idx:T:`),
--   then partition tags.
-- Replies: now, then for each index with due members [tag, index name, ids]. Errors: none.
server.register_function({
  function_name = 'ff_scan_due',
  flags = { 'no-writes' },
  callback = function(_, args)
    local now = clock.now()
    local limit, offset, count = args[1], args[2], tonumber(args[3])
    local pages = {}
    for t = 4 + count, #args do
      for i = 4, 3 + count do
        local ids = server.call('ZRANGE', K.index(args[t], args[i]), '-inf', now, 'BYSCORE',
          'LIMIT', offset, limit)
        if #ids > 0 then pages[#pages + 1] = { args[t], args[i], ids } end
      end
    end
    return reply.ok(now, pages)
  end,
})
