-- How functions are registered, and which of them work while the server is at its memory limit:
-- nothing is taken in then, but what is stored goes on, ends and is deleted in time.
local TAKES_IN = {
  ff_create = true, ff_replay = true, ff_signal = true, ff_append = true, ff_set_tags = true,
  ff_create_waitpoint = true,
}

local function register(name, callback)
  server.register_function({
    function_name = name, callback = callback, flags = TAKES_IN[name] and {} or { 'allow-oom' },
  })
end
