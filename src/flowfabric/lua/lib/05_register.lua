-- Registers a function with its flags: `no-writes` if it only reads; `allow-oom` if it must work
-- while the server is at its memory limit, so that stored work still runs, ends and is deleted;
-- none if it accepts new input, which a full server refuses.
function register(name, callback, flags)
  server.register_function({ function_name = name, callback = callback, flags = flags })
end

-- What the server refuses whatever is stored: a slot on the move, a missing right, no memory.
local function is_refusal(why)
  local word = string.match(why, '^(%u+) ')
  if word ~= 'ERR' then return word ~= nil and word ~= 'WRONGTYPE' end
  return string.find(why, 'non local key', 1, true) or string.find(why, 'ACL failure', 1, true)
    or string.find(why, 'cluster is down', 1, true)
end

local function caught(ok, answer, ...)
  if not ok then
    answer = tostring(type(answer) == 'table' and answer.err or answer)
    if is_refusal(answer) then error({ err = answer }, 0) end
  end
  return ok, answer, ...
end

-- `pcall` for what stored data may break. It gives the reason as text. A refusal by the server
-- says nothing about the data: it passes through, and the caller of the function gets it.
function try(...) return caught(pcall(...)) end
