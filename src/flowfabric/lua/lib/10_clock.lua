-- The only clock of the engine: the server's own time in whole milliseconds.
-- `shifted` tells that it differs from the time the server itself would write.
clock.offset, clock.last, clock.shifted = 0, 0, false

-- The last time there is: beyond it a double is no longer exact. Durations may be any u64.
clock.END = 9007199254740991

function clock.after(moment, ms) return math.min(moment + ms, clock.END) end

-- A step back of up to this many ms is smoothed over; a larger one is a clock
-- that somebody corrected, and is believed.
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
