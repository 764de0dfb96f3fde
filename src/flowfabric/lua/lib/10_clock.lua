-- The only clock of the engine: the server's own time in whole milliseconds.
local clock = { offset = 0, last = 0 }

-- A step back of up to this many ms is smoothed over; a larger one is a clock
-- that somebody corrected, and is believed.
local SMOOTHED_STEP_BACK_MS = 5000

function clock.now()
  local t = server.call('TIME')
  local ms = t[1] * 1000 + math.floor(t[2] / 1000) + clock.offset
  if ms < clock.last and clock.last - ms <= SMOOTHED_STEP_BACK_MS then
    return clock.last
  end
  clock.last = ms
  return ms
end
