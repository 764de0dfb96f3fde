-- ff_version: which library this is.
-- Arguments: none. Replies: version, content hash, oldest library version whose callers it serves,
--   about how many entries it keeps in each event feed, made for a cluster (0 | 1), has functions
--   that are not part of the package (0 | 1), how much one call does for members that depend on
--   others. Errors: none. Events: none.
register('ff_version', function()
  return { SETTINGS.version, SETTINGS.content_hash, SETTINGS.min_client,
    tonumber(SETTINGS.events_maxlen), SETTINGS.cluster and 1 or 0, SETTINGS.extended and 1 or 0,
    SETTINGS.cascade_units }
end, { 'no-writes', 'allow-stale' })
