-- Registers a function with its flags: `no-writes` if it only reads; `allow-oom` if it must work
-- while the server is at its memory limit, so that stored work still runs, ends and is deleted;
-- none if it accepts new input, which a full server refuses.
function register(name, callback, flags)
  server.register_function({ function_name = name, callback = callback, flags = flags })
end
