-- Waitpoint tokens: `<kid>:<HMAC-SHA1 as 40 hex digits>` over id, key and creation time, with the
-- partition's own copy of the signing secrets.

local BLOCK = 64

local function bytes(hex)
  return (string.gsub(hex, '%x%x', function(pair) return string.char(tonumber(pair, 16)) end))
end

local function xored(text, with)
  local out = {}
  for i = 1, BLOCK do out[i] = string.char(bit.bxor(string.byte(text, i) or 0, with)) end
  return table.concat(out)
end

-- The two padded keys of a secret; false if it is not even-length hex.
local pads = values.memo(function(secret)
  if #secret == 0 or #secret % 2 == 1 or string.find(secret, '[^%x]') then return false end
  local key = bytes(secret)
  if #key > BLOCK then key = bytes(server.sha1hex(key)) end
  return { inner = xored(key, 0x36), outer = xored(key, 0x5c) }
end)

local function digest(secret, waitpoint_id, key, created_at)
  local pad, message = pads(secret), waitpoint_id .. '|' .. key .. '|' .. created_at
  return pad and server.sha1hex(pad.outer .. bytes(server.sha1hex(pad.inner .. message)))
end

function tokens.mint(c, waitpoint_id, key, created_at)
  local store = K.secrets(c.tag)
  local kid = server.call('HGET', store, 'current_kid')
  local secret = kid and server.call('HGET', store, 'secret:' .. kid)
  if not secret then reply.refuse('hmac_secret_not_initialized') end
  local code = digest(secret, waitpoint_id, key, values.text(created_at))
  if not code then reply.refuse('invalid_secret') end
  return kid .. ':' .. code
end

function tokens.in_grace(expires, now)
  local at = expires and string.match(expires, '^%d+$') and tonumber(expires)
  return at and at > 0 and at >= now
end

-- Whether the code was made for this waitpoint. Takes as long for an unknown waitpoint.
local function proves(secret, code, waitpoint_id, point)
  local key, created_at = point and point.waitpoint_key, point and point.created_at
  local made = digest(secret, waitpoint_id, key or '', created_at or '')
  return values.equal(made, code) and key and created_at
end

-- The problem with a token; with a waitpoint, also checks that the token belongs to it. Other
-- problems depend only on the token and the key store, so they reveal nothing about waitpoints.
function tokens.problem(c, token, waitpoint_id, point)
  local kid, code = string.match(token, '^([^:]+):(.*)$')
  if not kid or #code ~= 40 then return reply.err('invalid_token') end
  local found = server.call('HMGET', K.secrets(c.tag),
    'current_kid', 'secret:' .. kid, 'expires_at:' .. kid)
  if not found[1] then return reply.err('hmac_secret_not_initialized') end
  if not found[2] then return reply.err('invalid_token') end
  if found[1] ~= kid and not tokens.in_grace(found[3], c.now) then return reply.err('token_expired') end
  if not pads(found[2]) then return reply.err('invalid_secret') end
  if waitpoint_id and not proves(found[2], code, waitpoint_id, point) then
    return reply.err('invalid_token')
  end
end

-- The current kid, and the past ones, each with the time until which it is accepted, or false.
function tokens.kids(tag, now)
  local fields, past = values.fields(server.call('HGETALL', K.secrets(tag))), {}
  for name in pairs(fields) do
    local kid = string.match(name, '^secret:(.+)$') or string.match(name, '^expires_at:(.+)$')
    if kid and kid ~= fields.current_kid then
      local expires = fields['secret:' .. kid] and fields['expires_at:' .. kid]
      past[kid] = tokens.in_grace(expires, now) and tonumber(expires) or false
    end
  end
  return fields.current_kid, past
end
