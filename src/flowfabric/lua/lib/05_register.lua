-- How functions are registered, and which of them work while the server is at its memory limit:
-- no new work is taken in then, but what is stored goes on, ends and is deleted in time.
local WORK_WHEN_FULL = {
  ff_claim_many = true, ff_renew = true, ff_complete = true, ff_fail = true, ff_delay = true,
  ff_suspend = true, ff_wait_children = true, ff_cancel = true, ff_revoke = true,
  ff_mark_expired = true, ff_expire = true, ff_expire_suspension = true,
  ff_expire_waitpoint = true, ff_promote_delayed = true, ff_trim = true, ff_purge = true,
  ff_reconcile = true, ff_worker_heartbeat = true, ff_worker_dead = true,
}

local function register(name, callback)
  server.register_function({
    function_name = name, callback = callback, flags = { WORK_WHEN_FULL[name] and 'allow-oom' },
  })
end
