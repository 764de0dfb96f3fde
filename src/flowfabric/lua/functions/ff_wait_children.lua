-- ff_wait_children: the lease holder parks until its open dependencies are resolved.
-- Keys: core, flow in, lane active / blocked:dependencies, lease_expiry, worker leases.
-- Arguments: execution_id, fence, source (an override: `operator_override <request id>`).
-- Replies: `moved` | `ready` (nothing to wait for: the lease is kept) | `impossible`, upstreams that
--   ended otherwise than the edges demand (the lease is kept).
-- Errors: execution_not_found and those of the fence. Events: released, expired (a lapsed lease).
pausing.register_function('ff_wait_children', 'waiting_children', function(c, id, rec)
  local g = edges.group(id, rec)
  if g.state == 'i' then
    local ended, all = {}, values.fields(server.call('HGETALL', K.into(c.tag, rec.flow_id, id)))
    for _, text in pairs(all) do
      if edges.is_impossible(text) then
        ended[#ended + 1] = edges.id_of(c, edges.parse(id, text).upstream)
      end
    end
    table.sort(ended)
    return 'impossible', ended
  end
  if g.state == 's' or edges.open_count(g) == 0 then return 'ready' end
  pausing.release(c, id, rec, S.waiting_children('i'), 'waiting_children:moved', {})
  return 'moved'
end, { 'allow-oom' })
