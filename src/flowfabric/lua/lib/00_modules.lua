-- The tables of all helper files, declared first: each file has its own scope and fills its table,
-- and functions of different files may call each other.
local register, try
local clock, values, K, S, Context, record, reply = {}, {}, {}, {}, {}, {}, {}
local events, streams, tokens, conditions, lease, waiting, suspension = {}, {}, {}, {}, {}, {}, {}
local fence, operator, ending, signals, retry, claiming, pausing = {}, {}, {}, {}, {}, {}, {}
local subflows, admission, lanes, offers, listeners = {}, {}, {}, {}, {}
local granting, workers, purging, batch, indexes = {}, {}, {}, {}, {}
local flow, edges, cascade, creating, graph, flow_cancel, replaying = {}, {}, {}, {}, {}, {}, {}
local flow_purging, budgets, quota, steps = {}, {}, {}, {}
