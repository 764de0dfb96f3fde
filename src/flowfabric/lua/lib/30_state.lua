-- The state vector is one six-letter code on the record: phase, ownership,
-- eligibility, blocking reason, outcome, attempt (letters: core/state.py).
-- Every transition of the engine writes one of the codes below.
S.NEW = 'ruewnf'
S.ACTIVE = 'alnnnr'
S.EXPIRED = 'axnwni'
S.REVOKED = 'avnwni'

local PHASES = { s = 'submitted', r = 'runnable', a = 'active', p = 'suspended', t = 'terminal' }
local OUTCOMES = {
  n = 'none', s = 'success', f = 'failed', c = 'cancelled', x = 'expired', k = 'skipped',
}

-- One letter of a code; there are few codes, so each is cut once.
local function letter(position)
  local known = {}
  return function(code)
    local found = known[code]
    if not found then
      found = string.sub(code, position, position)
      known[code] = found
    end
    return found
  end
end

-- The letters that may stand at each place of a code; core/state.py has the same.
local CODE = '^[srapt][ulxv][edcbqrlon][nwbrdsaktcuqgyopf][nsfcxk][nfritpz]$'
local codes = {}
function S.is_code(code)
  if codes[code] then return true end
  if not code or not string.find(code, CODE) then return false end
  codes[code] = true
  return true
end

S.phase = letter(1)
S.ownership = letter(2)
S.eligibility = letter(3)
S.outcome = letter(5)
S.attempt = letter(6)
function S.phase_name(code) return PHASES[S.phase(code)] end
function S.outcome_name(code) return OUTCOMES[S.outcome(code)] end

-- Whether a retry or a replay is still to come: the last attempt is over, the next not there.
function S.between_attempts(code)
  local attempt = S.attempt(code)
  return attempt == 't' or attempt == 'p'
end

function S.eligible(attempt) return 'ruewn' .. attempt end
function S.delayed(blocking, attempt) return 'rud' .. blocking .. 'n' .. attempt end
function S.waiting_children(attempt) return 'ruccn' .. attempt end

-- A terminal attempt letter says whether an attempt ever existed.
function S.terminal(outcome, attempt, attempted)
  return 'tunn' .. outcome .. (attempted and 'z' or attempt)
end

local PUBLIC_TERMINAL = { s = 'completed', f = 'failed', c = 'cancelled', x = 'expired', k = 'skipped' }
local PUBLIC_RUNNABLE = { d = 'delayed', c = 'waiting_children', b = 'rate_limited', q = 'rate_limited' }
function S.public(code)
  local phase = S.phase(code)
  if phase == 't' then return PUBLIC_TERMINAL[S.outcome(code)] or 'failed' end
  if phase == 'p' then return 'suspended' end
  if phase == 'a' then return 'active' end
  if phase ~= 'r' then return 'waiting' end
  return PUBLIC_RUNNABLE[S.eligibility(code)] or 'waiting'
end

local BLOCKED = {
  c = 'blocked:dependencies', b = 'blocked:budget', q = 'blocked:quota',
  r = 'blocked:route', l = 'blocked:lane', o = 'blocked:operator',
}
-- The one lane index that holds an execution in this state.
function S.index_suffix(code)
  if code == S.NEW then return 'eligible' end
  local phase = S.phase(code)
  if phase == 'a' then return 'active' end
  if phase == 'p' then return 'suspended' end
  if phase == 't' then return 'terminal' end
  local eligibility = S.eligibility(code)
  if eligibility == 'd' then return 'delayed' end
  return BLOCKED[eligibility] or 'eligible'
end
