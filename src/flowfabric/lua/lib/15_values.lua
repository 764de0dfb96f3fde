-- Questions about plain values that several parts ask.

-- Compares without telling by its duration where the two differ.
function values.equal(a, b)
  if #a ~= #b then return false end
  local difference = 0
  for i = 1, #a do
    difference = bit.bor(difference, bit.bxor(string.byte(a, i), string.byte(b, i)))
  end
  return difference == 0
end

-- The bytes of all texts from `first` on.
function values.bytes(list, first)
  local bytes = 0
  for i = first, #list do bytes = bytes + #list[i] end
  return bytes
end

function values.lists(list, wanted)
  for _, value in ipairs(list) do
    if value == wanted then return true end
  end
  return false
end

-- Lua puts all arguments of a command on its stack: a longer list goes in pieces. Gives the first
-- and the last place of each. The size is even, so name, value pairs stay together.
local PIECE = 400
function values.pieces(list, first)
  local last = (first or 1) - 1
  return function()
    if last >= #list then return nil end
    local start = last + 1
    last = math.min(last + PIECE, #list)
    return start, last
  end
end

-- A stored number, or nil when there is none; anything else there is corruption.
function values.number(context, field, text)
  if not text then return nil end
  return tonumber(text) or error(context .. ': ' .. field .. ': is not a number', 0)
end

-- The fields of a hash, which the server answers as a flat list; `into` has their defaults.
function values.fields(flat, into)
  local fields = into or {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end
