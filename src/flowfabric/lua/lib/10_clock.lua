-- The engine's only clock: the server's time in whole milliseconds.
-- `shifted`: it differs from the time that the server writes into stream ids.
clock.offset, clock.last, clock.shifted = 0, 0, false

-- The last representable time: beyond it a double is not exact. Durations may be any u64.
clock.END = 9007199254740991

function clock.after(moment, ms) return math.min(moment + ms, clock.END) end

-- Ignore a smaller step back; a larger one means that the clock was corrected.
local SMOOTHED_STEP_BACK_MS = 5000

function clock.now()
  local t = server.call('TIME')
  local ms = t[1] * 1000 + math.floor(t[2] / 1000) + clock.offset
  clock.shifted = clock.offset ~= 0
  if ms < clock.last and clock.last - ms <= SMOOTHED_STEP_BACK_MS then
    clock.shifted = true
    return clock.last
  end
  clock.last = ms
  return ms
end
