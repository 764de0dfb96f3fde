-- ff_create: accept executions, each at most once per id and per idempotency key.
-- Keys: core, payload, policy, tags, idem, all_executions, lane eligible / delayed,
--   execution_deadline; of a member: flow core, members, edges, in, out.
-- Arguments: common options (msgpack map or empty), then per item: execution_id, kind, payload,
--   payload encoding, options (msgpack map or empty; they win over the common ones).
--   Options: ns, lane, prio, creator, idem, digest, view (number of shards that the submitter knows),
--   tags (flat list), policy (JSON),
--   delay, delay_in (ms from now), deadline; of a member: flow, node (its key), join (policy), named (has
--   input names), deps (a list of edge id, upstream uuid, kind letter, input name, reference).
-- Replies per item: public_state | [1, DUPLICATE, id] | [0, code, detail...].
-- Errors: invalid_input (the id exists in another namespace), lane_not_accepting, invalid_policy_json,
--   invalid_capabilities, signature_limit_exceeded, execution_being_deleted, idempotency_conflict (key, id),
--   lane_placement_changed (lane, shards); of a member: flow_not_found, flow_already_terminal,
--   invalid_input, execution_not_in_flow, dependency_already_exists; of the whole call:
--   batch_too_large. Events: completion (a member whose upstream has ended).
register('ff_create', function(keys, args)
  local problem = batch.excess(args, (#args - 1) / 5)
  if problem then return problem end
  local c = Context.open(keys[1], #args > 6)
  local common = args[1] ~= '' and cmsgpack.unpack(args[1]) or creating.NONE
  local replies = {}
  for i = 2, #args, 5 do
    replies[#replies + 1] =
      reply.guarded(creating.create, c, args[i], args[i + 1], args[i + 2], args[i + 3],
        creating.options(common, args[i + 4]))
  end
  c:close()
  return reply.ok(replies, cascade.told(c))
end, {})
