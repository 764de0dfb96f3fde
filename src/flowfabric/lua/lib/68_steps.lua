-- Step records: what handlers of an execution have done. The hash has, per record, `k:<step key>`
-- (its seq) and `r:<seq>` (the packed record); `n` has the number of records and the bytes of their
-- results and errors. Records are never removed, so the seqs have no gaps.

local MAX_RECORDS, MAX_BYTES = 10000, 16777216
-- How many records the first command reads; their size determines how many to read next.
local FIRST_CHUNK, LARGEST_CHUNK = 16, 400
-- Limits of what a claim carries: bytes per execution, bytes in total, and the least that a record
-- counts.
local CLAIMED_BYTES, CLAIM_BYTES, LEAST_BYTES = 262144, 1048576, 1024

local function content(rec) return #(rec.result or '') + #(rec.reason or '') + #(rec.category or '') end

local function stop(id, problem) error(id .. ': steps: ' .. problem, 0) end

-- A record by position, as it is stored and as callers get it.
local function packed(seq, rec)
  return cmsgpack.pack({
    seq, rec.step_key, rec.kind, rec.status, rec.codec or false, rec.result or false, rec.reason or false,
    rec.category or false, rec.attempt_index, rec.epoch, rec.started_at, rec.finished_at or false,
    rec.fire_at or false, rec.child or false,
  })
end

local function row(id, seq, text)
  local ok, parts = pcall(cmsgpack.unpack, text or '')
  if not ok or type(parts) ~= 'table' or parts[1] ~= seq then
    stop(id, 'record ' .. seq .. (text and ' cannot be read' or ' is missing'))
  end
  return parts
end

-- The number of records and their bytes.
local function totals(id, text)
  if not text then return 0, 0 end
  local count, bytes = string.match(text, '^(%d+) (%d+)$')
  if not count then stop(id, 'the number of records cannot be read') end
  return tonumber(count), tonumber(bytes)
end

-- The record with this key, by position, or nil; and what `store` needs about the others.
function steps.find(c, id, step_key)
  local key = K.steps(c.tag, id)
  local found = server.call('HMGET', key, 'k:' .. step_key, 'n')
  local seq = found[1]
  return seq and row(id, tonumber(seq), server.call('HGET', key, 'r:' .. seq)) or nil, found[2]
end

-- Stores a record: a new one, or with a seq that of a pending one, which had no content. Returns its
-- seq, or nil and the error if the execution has too many or too large records.
function steps.store(c, id, rec, seq, others)
  local key = K.steps(c.tag, id)
  local count, bytes = totals(id, others)
  bytes = bytes + content(rec)
  if not seq then count = count + 1 end
  if count > MAX_RECORDS or bytes > MAX_BYTES then
    return nil, reply.err('step_limit_exceeded',
      count > MAX_RECORDS and 'the limit is ' .. MAX_RECORDS .. ' records per execution'
      or 'the limit is ' .. MAX_BYTES .. ' bytes per execution')
  end
  seq = seq or count
  local name = values.text(seq)
  server.call('HSET', key, 'k:' .. rec.step_key, name, 'r:' .. name, packed(seq, rec),
    'n', values.text(count) .. ' ' .. values.text(bytes))
  return seq
end

-- Rows after a seq; the seq to continue after, or false; and the bytes that were read.
function steps.page(c, id, after, limit, max_bytes)
  local key, rows, bytes, chunk = K.steps(c.tag, id), {}, 0, FIRST_CHUNK
  local count = totals(id, server.call('HGET', key, 'n'))
  local last = math.min(after + limit, count)
  while after < last and bytes < max_bytes do
    local names = {}
    for seq = after + 1, math.min(after + chunk, last) do names[#names + 1] = 'r:' .. seq end
    for _, text in ipairs(server.call('HMGET', key, unpack(names))) do
      after = after + 1
      rows[#rows + 1] = row(id, after, text)
      bytes = bytes + #text
      if bytes >= max_bytes then break end
    end
    local each = bytes / #rows
    chunk = math.max(1, math.min(LARGEST_CHUNK, math.floor((max_bytes - bytes) / each)))
  end
  return rows, limit > 0 and after < count and after or false, bytes
end

-- What a claim carries: the first page. If it cannot be read, or the call has already read a lot, the
-- worker reads the steps itself when it needs them.
function steps.claimed_page(c, id)
  local room = c.step_room or CLAIM_BYTES
  local most = math.floor(room / LEAST_BYTES)
  if most < 1 then return { {}, 0 } end
  local readable, rows, following, bytes = try(steps.page, c, id, 0, most, CLAIMED_BYTES)
  if not readable then return { {}, 0 } end
  c.step_room = room - math.max(bytes, #rows * LEAST_BYTES)
  return { rows, following }
end
