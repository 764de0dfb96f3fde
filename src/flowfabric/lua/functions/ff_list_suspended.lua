-- ff_list_suspended: suspended executions of a partition by (index score, id), after a position.
-- Keys: lane suspended indexes, suspensions. Arguments: limit, score to start after, id to
--   start after (empty: from the beginning), then lanes.
-- Replies: per execution [id, score, lane, fields of its suspension as stored (suspension_id,
--   reason_code, requested_by, created_at, timeout_at, closed_at, prompt, details) or nothing if
--   that is not a hash]; then how many of the lanes were read: the caller asks for the others again;
--   then the lanes among them whose index cannot be read. Errors: none.

-- After this many index reads and rows, a call reads no further lane.
local AT_ONCE = 2000

local function before(a_score, a_id, b_score, b_id)
  return a_score < b_score or (a_score == b_score and a_id < b_id)
end

-- The members after the position, which may be gone, and the number of reads to find it.
local function read_page(key, score, id, limit)
  local reads, low, high = 0, 0, id ~= '' and server.call('ZCARD', key) or 0
  while low < high do
    local middle = math.floor((low + high) / 2)
    reads = reads + 1
    local found = server.call('ZRANGE', key, middle, middle, 'WITHSCORES')
    if before(score, id, tonumber(found[2]), found[1]) then high = middle else low = middle + 1 end
  end
  return server.call('ZRANGE', key, low, low + limit - 1, 'WITHSCORES'), reads
end

register('ff_list_suspended', function(keys, args)
  local c = Context.open(keys[1])
  local limit, rows, work, lanes_read, unreadable = tonumber(args[1]), {}, 0, 0, {}
  for i = 4, #args do
    if work >= AT_ONCE then break end
    lanes_read = lanes_read + 1
    local key = K.lane(c.tag, args[i], 'suspended')
    local ok, page, reads = try(read_page, key, tonumber(args[2]), args[3], limit)
    if not ok then unreadable[#unreadable + 1], page, reads = args[i], {}, 0 end
    work = work + 1 + reads + #page / 2
    for j = 1, #page, 2 do
      rows[#rows + 1] = { page[j], tonumber(page[j + 1]), args[i] }
    end
  end
  table.sort(rows, function(a, b) return before(a[2], a[1], b[2], b[1]) end)
  rows = values.slice(rows, 1, math.min(limit, #rows))
  for _, row in ipairs(rows) do
    local readable, found = try(server.call, 'HMGET', K.suspension(c.tag, row[1]), 'suspension_id',
      'reason_code', 'requested_by', 'created_at', 'timeout_at', 'closed_at', 'prompt', 'details')
    row[4] = readable and found
  end
  return reply.ok(rows, lanes_read, unreadable)
end, { 'no-writes' })
