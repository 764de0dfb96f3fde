-- ff_promote_blocked: make a member eligible that waits for dependencies although none is open.
-- Keys: core, flow core, indexes of the child. Arguments: execution_id.
-- Replies: public_state. Errors: execution_not_found, not_runnable, not_blocked_by_deps, terminal,
--   deps_not_satisfied (open edges, unsatisfied edges). Events: none; rings the doorbell.
record.register_function('ff_promote_blocked', record.checked, function(c, id, rec)
  if not S.is_runnable(rec.state) then return reply.err('not_runnable', S.phase_name(rec.state)) end
  if not S.is_blocked_by_dependencies(rec.state) then return reply.err('not_blocked_by_deps') end
  if S.has_outcome(rec.state) then return reply.err('terminal') end
  if rec.subflow_open then return reply.err('deps_not_satisfied', '1', '1') end
  local g = edges.group(id, rec)
  local verdict = g.n == 0 and 's' or g.state == 'p' and edges.verdict(c, id, rec, g) or g.state
  if verdict ~= 's' then
    local open = edges.open_count(g)
    return reply.err('deps_not_satisfied', values.text(open), values.text(g.n - g.succeeded))
  end
  flow.move_on(c, id, rec)
  return reply.ok(S.public(rec.state))
end, { 'allow-oom' })
