-- ff_expire_waitpoint: close pending waitpoints that no suspension used in time.
-- Keys: waitpoint, pending_waitpoint_expiry.
-- Arguments: any number of waitpoint ids.
-- Replies per id: closed | not_yet_due | not_pending_cleaned | not_found_cleaned | error:<why>.
-- Errors: none. Events: none.
batch.register_function('ff_expire_waitpoint', 1, function(c, waitpoint_id)
  local index = K.index(c.tag, 'pending_waitpoint_expiry')
  local found = server.call('HMGET', K.waitpoint(c.tag, waitpoint_id), 'state', 'expires_at',
    'execution_id')
  if found[1] ~= 'pending' then
    server.call('ZREM', index, waitpoint_id)
    return found[1] and 'not_pending_cleaned' or 'not_found_cleaned'
  end
  if tonumber(found[2]) > c.now then return 'not_yet_due' end
  suspension.close_waitpoint(c, waitpoint_id, 'never_committed')
  suspension.forget_pending(c, found[3], waitpoint_id)
  return 'closed'
end, { 'allow-oom' })
