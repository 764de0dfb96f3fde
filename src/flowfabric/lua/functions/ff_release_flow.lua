-- ff_release_flow: let the members of a held flow run.
-- Keys: flow core, held, release_backlog, and the indexes of its members. Arguments: flow_id.
-- Replies: members released now, whether more follow by ff_drain_cascade (1 | 0). Errors: flow_not_found, flow_already_terminal.
-- Events: none; rings the doorbell.
register('ff_release_flow', function(keys, args)
  local c, flow_id = Context.open(keys[1], true), args[1]
  return reply.guarded(function()
    local f = flow.shown(c, flow_id)
    if not f.held_from then return reply.ok(0, 0) end
    if flow.ends_members(f) then return reply.err('flow_already_terminal') end
    if f.hold then flow.clear(c, flow_id, 'hold') end
    if f.awaits_parent then return reply.ok(0, 0) end
    local done, released = flow.release(c, flow_id)
    c:close()
    return reply.ok(released, done and 0 or 1, cascade.told(c))
  end, c, flow_id)
end, { 'allow-oom' })
