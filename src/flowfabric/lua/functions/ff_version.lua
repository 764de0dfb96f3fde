-- ff_version: which library this is.
-- Arguments: none. Replies: version, content hash, oldest library version whose callers it serves,
--   about how many entries it keeps in each event feed.
-- Errors: none. Events: none.
register('ff_version', function()
  return { SETTINGS.version, SETTINGS.content_hash, SETTINGS.min_client,
    tonumber(SETTINGS.events_maxlen) }
end, { 'no-writes', 'allow-stale' })
