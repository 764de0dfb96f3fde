-- Helpers for plain values.

-- A function that caches its results, up to a limit.
local MEMO_MAX = 1000
function values.memo(compute)
  local known, count = {}, 0
  return function(key)
    local result = known[key]
    if result == nil then
      if count >= MEMO_MAX then known, count = {}, 0 end
      result = compute(key)
      known[key], count = result, count + 1
    end
    return result
  end
end

-- A whole number as text: the server would format the number again for every command.
values.text = values.memo(function(number) return string.format('%.0f', number) end)

-- Compares in constant time.
function values.equal(a, b)
  if #a ~= #b then return false end
  local difference = 0
  for i = 1, #a do
    difference = bit.bor(difference, bit.bxor(string.byte(a, i), string.byte(b, i)))
  end
  return difference == 0
end

function values.bytes(list, first)
  local bytes = 0
  for i = first, #list do bytes = bytes + #list[i] end
  return bytes
end

function values.contains(list, wanted)
  for _, value in ipairs(list) do
    if value == wanted then return true end
  end
  return false
end

function values.append(list, more)
  for _, value in ipairs(more) do list[#list + 1] = value end
end

function values.slice(list, first, last)
  local part = {}
  for i = first, last do part[#part + 1] = list[i] end
  return part
end

-- Adds a field to a flat list of names and values, unless it is missing or empty.
function values.add(fields, name, value)
  if not value or value == '' then return end
  fields[#fields + 1] = name
  fields[#fields + 1] = value
end

-- Splits a long list, because Lua passes the arguments of a command on its stack. Returns the first
-- and last position of each piece. The size is even, so that name, value pairs stay together.
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

-- Sends a command that names one key, with any number of arguments after it.
function values.send(args)
  if #args <= PIECE then return server.call(unpack(args)) end
  for first, last in values.pieces(args, 3) do
    server.call(args[1], args[2], unpack(args, first, last))
  end
end

function values.call(command, key, list)
  for first, last in values.pieces(list) do server.call(command, key, unpack(list, first, last)) end
end

-- The fields of a hash from the server's flat list; `into` has their defaults.
function values.fields(flat, into)
  local fields = into or {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end
