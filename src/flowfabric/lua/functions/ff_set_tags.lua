-- ff_set_tags: add or replace tags in any phase.
-- Keys: core, tags. Arguments: execution_id, then key, value pairs (validated by the caller).
-- Replies: number of pairs written. Errors: execution_not_found, tag_limit_exceeded. Events: none.
local MAX_PAIRS = 128
local MAX_BYTES = 1048576

reply.register_function('ff_set_tags', function(c, id, args)
  local core, pairs_given = K.core(c.tag, id), (#args - 1) / 2
  local found = server.call('HMGET', core, 'state', 'tagged')
  if not found[1] then return reply.err('execution_not_found') end
  if pairs_given > MAX_PAIRS then
    return reply.err('tag_limit_exceeded', MAX_PAIRS .. ' pairs per call')
  end
  local stored, names = K.tags(c.tag, id), {}
  for i = 2, #args, 2 do names[#names + 1] = args[i] end
  local bytes = (tonumber(found[2]) or 0) + values.bytes(args, 2)
  for i, value in ipairs(server.call('HMGET', stored, unpack(names))) do
    if value then bytes = bytes - #names[i] - #value end
  end
  if bytes > MAX_BYTES then return reply.err('tag_limit_exceeded', MAX_BYTES .. ' bytes') end
  server.call('HSET', core, 'tagged', math.max(1, bytes), 'last_mutation_at', c.now)
  server.call('HSET', stored, unpack(args, 2))
  return reply.ok(pairs_given)
end, {})
