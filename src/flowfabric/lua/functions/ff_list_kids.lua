-- ff_list_kids: the signing keys of a partition that verify now, without their secrets.
-- Keys: key store. Arguments: none.
-- Replies: current kid or nothing, [kid, expires at] of each past one. Errors: none.
register('ff_list_kids', function(keys)
  local now, fields = clock.now(), tokens.stored(keys[1])
  local past = {}
  for name, expires in pairs(fields) do
    local kid = string.match(name, '^expires_at:(.+)$')
    if kid and kid ~= fields.current_kid and fields['secret:' .. kid]
        and tokens.in_grace(expires, now) then
      past[#past + 1] = { kid, tonumber(expires) }
    end
  end
  return reply.ok(fields.current_kid or false, past)
end, { 'no-writes' })
