-- The state vector is one six-letter code on the record: phase, ownership, eligibility, blocking
-- reason, outcome, attempt (letters: core/state.py). Every transition writes one of these codes.
S.NEW = 'ruewnf'
S.ACTIVE = 'alnnnr'
S.EXPIRED = 'axnwni'
S.REVOKED = 'avnwni'

local PHASES = { s = 'submitted', r = 'runnable', a = 'active', p = 'suspended', t = 'terminal' }
local OUTCOMES = {
  n = 'none', s = 'success', f = 'failed', c = 'cancelled', x = 'expired', k = 'skipped',
}
local PUBLIC_TERMINAL = { s = 'completed', f = 'failed', c = 'cancelled', x = 'expired', k = 'skipped' }
local PUBLIC_RUNNABLE = { d = 'delayed', c = 'waiting_children', b = 'rate_limited', q = 'rate_limited' }
local BLOCKED = {
  c = 'blocked:dependencies', b = 'blocked:budget', q = 'blocked:quota',
  r = 'blocked:route', l = 'blocked:lane', o = 'blocked:operator',
}

local function letter(position)
  return values.memo(function(code) return string.sub(code, position, position) end)
end

local function matching(pattern)
  return values.memo(function(code) return string.find(code, pattern) ~= nil end)
end

-- The letters allowed at each position; core/state.py has the same.
local is_code = matching('^[srapt][ulxv][edcbqrlon][nwbrdsaktcuqgyopf][nsfcxk][nfritpz]$')
function S.is_code(code) return code ~= nil and is_code(code) end

local phase, eligibility = letter(1), letter(3)
S.blocking = letter(4)
S.outcome = letter(5)
S.attempt = letter(6)
function S.phase_name(code) return PHASES[phase(code)] end
function S.outcome_name(code) return OUTCOMES[S.outcome(code)] end

S.is_runnable = matching('^r')
S.is_active = matching('^a')
S.is_suspended = matching('^p')
S.is_terminal = matching('^t')
S.is_unowned = matching('^.u')
S.is_leased = matching('^.l')
S.is_lease_expired = matching('^.x')
S.is_lease_revoked = matching('^.v')
S.is_lease_lost = matching('^a[xv]')
S.is_eligible = matching('^..e')
S.is_delayed = matching('^..d')
S.is_blocked_by_dependencies = matching('^ruc')
S.is_blocked_by_budget = matching('^rub')
S.is_blocked_by_quota = matching('^ruq')
S.is_held = matching('^ruo')
S.is_blocked = matching('^ru[bqrlo]')
S.has_outcome = matching('^....[^n]')
S.is_success = matching('^....s')
S.is_cancelled = matching('^....c')
S.is_skipped = matching('^....k')
S.awaits_first_attempt = matching('f$')
S.awaits_replay = matching('^ru...p$')
S.has_running_attempt = matching('r$')
S.has_paused_attempt = matching('i$')
S.has_ended_attempt = matching('z$')
-- The last attempt has ended; a retry or replay has not started yet.
S.between_attempts = matching('[tp]$')

function S.attempt_end(code)
  if S.is_success(code) then return 'ended_success' end
  return (S.is_cancelled(code) or S.is_skipped(code)) and 'ended_cancelled' or 'ended_failure'
end

function S.eligible(attempt) return 'ruewn' .. attempt end
function S.delayed(blocking, attempt) return 'rud' .. blocking .. 'n' .. attempt end
-- `cause`: the letters of the eligibility and of the blocking reason.
function S.blocked(cause, attempt) return 'ru' .. cause .. 'n' .. (attempt == 'n' and 'f' or attempt) end
function S.held(attempt) return 'ruoon' .. attempt end
function S.waiting_children(attempt) return 'ruccn' .. attempt end

-- The attempt letter of a terminal state tells whether an attempt ever existed.
function S.terminal(outcome, attempt, attempted)
  return 'tunn' .. outcome .. (attempted and 'z' or outcome == 'k' and 'n' or attempt)
end

S.public = values.memo(function(code)
  if S.is_terminal(code) then return PUBLIC_TERMINAL[S.outcome(code)] or 'failed' end
  if S.is_suspended(code) then return 'suspended' end
  if S.is_active(code) then return 'active' end
  return S.is_runnable(code) and PUBLIC_RUNNABLE[eligibility(code)] or 'waiting'
end)

-- The public states, and which of them are ends.
S.PUBLIC = {
  'waiting', 'delayed', 'rate_limited', 'waiting_children', 'active', 'suspended', 'completed',
  'failed', 'cancelled', 'expired', 'skipped',
}
local ENDED = { completed = true, failed = true, cancelled = true, expired = true, skipped = true }
function S.is_ended(public) return ENDED[public] == true end

-- The one lane index that holds an execution in this state.
S.index_suffix = values.memo(function(code)
  if S.is_active(code) then return 'active' end
  if S.is_suspended(code) then return 'suspended' end
  if S.is_terminal(code) then return 'terminal' end
  if S.is_delayed(code) then return 'delayed' end
  return BLOCKED[eligibility(code)] or 'eligible'
end)
