-- ff_release_grant: return a grant that its worker does not use; another worker is woken.
-- Keys: core, claim_grant. Arguments: execution_id, token.
-- Replies: released, also if it was not valid any more. Errors: execution_not_found. Events: none.
record.register_function('ff_release_grant', record.checked, function(c, id, rec, args)
  local token = server.call('HGET', K.grant(c.tag, id), 'grant_token')
  if token and values.equal(token, args[2]) then
    lease.drop_grant(c, id, rec)
    waiting.ring(c, rec)
  end
  return reply.ok('released')
end, { 'allow-oom' })
