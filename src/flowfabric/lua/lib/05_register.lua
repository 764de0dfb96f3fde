-- Registers a function with its flags: `no-writes` if it only reads; `allow-oom` if it must work
-- at the server's memory limit, so that stored work still runs, ends and is deleted; none if it
-- accepts new input, which a full server refuses.
function register(name, callback, flags)
  server.register_function({ function_name = name, callback = callback, flags = flags })
end

-- Errors that stored data does not cause: a slot being moved, a missing permission, no memory.
local function is_refusal(why)
  local word = string.match(why, '^(%u+) ')
  if word ~= 'ERR' then return word ~= nil and word ~= 'WRONGTYPE' end
  return string.find(why, 'non local key', 1, true) or string.find(why, 'ACL failure', 1, true)
    or string.find(why, 'cluster is down', 1, true)
end

local function caught(ok, answer, ...)
  if not ok then
    if type(answer) == 'table' and answer.final then return true, answer.final end
    answer = tostring(type(answer) == 'table' and answer.err or answer)
    if is_refusal(answer) then error({ err = answer }, 0) end
  end
  return ok, answer, ...
end

-- `pcall` for errors caused by stored data; the reason is text. An answer of `reply.stop_with` is
-- returned; other errors pass through to the caller of the function.
function try(...) return caught(pcall(...)) end
