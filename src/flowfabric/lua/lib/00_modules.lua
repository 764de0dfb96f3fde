-- The tables of all helper files, declared before any of them runs: each file has a scope of its
-- own and fills its table, and functions of different files may call each other.
local register, try
local clock, values, K, S, Context, record, reply = {}, {}, {}, {}, {}, {}, {}
local events, streams, tokens, conditions, lease, waiting, suspension = {}, {}, {}, {}, {}, {}, {}
local fence, operator, ending, signals, retry, claiming, pausing = {}, {}, {}, {}, {}, {}, {}
local granting, workers, purging, batch, indexes = {}, {}, {}, {}, {}
