-- ff_list_kids: the signing keys of a partition that verify now, without their secrets.
-- Keys: key store. Arguments: none.
-- Replies: current kid or nothing, [kid, expires at] of each past one. Errors: none.
register('ff_list_kids', function(keys)
  local current, kids = tokens.kids(keys[1], clock.now())
  local past = {}
  for kid, expires in pairs(kids) do
    if expires then past[#past + 1] = { kid, expires } end
  end
  return reply.ok(current or false, past)
end, { 'no-writes' })
