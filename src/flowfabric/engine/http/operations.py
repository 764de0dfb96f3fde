"""The operations that a server offers to our own clients, in one table that both ends read.

Operations that are not in the table are only available on Valkey itself. `POST
/v1/engine/<noun>/<operation>` takes the arguments by name as JSON and answers with the result; both
have the types of `engine/api`.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any, Final, Literal, cast, get_args, get_type_hints

import msgspec

from flowfabric.engine.api.backend import Backend
from flowfabric.engine.http import codec
from flowfabric.engine.http.feeds import FeedOperations

OperationScope = Literal["read", "submit", "signal", "operate", "admin", "remote"]
ROOT: Final = "/v1/engine"
# `# noun` starts the operations of one noun. A line: the operation, the scope of tokens that may
# call it (`remote`: for holders of a lease), and marks. By default, the server recognises a repeat
# by the arguments.
#   keyed    it recognises a repeat by an idempotency key instead
#   mints=x  the client fills in the argument x, which identifies a repeat
#   needs=x  it recognises a repeat only if x is given
#   open     not limited to a namespace
#   rows     the answer leaves out rows of other namespaces
#   waits    the server may delay the answer
#   bulk     payloads may make the request long
#   many     the first argument is a list, which is sent in parts
_TABLE: Final = """
# executions
create_execution submit bulk
create_many submit bulk many
complete remote bulk
complete_many remote bulk many
complete_execution operate bulk
fail remote
fail_execution operate
cancel remote
cancel_execution operate
delay remote
delay_execution operate
release_unknown remote
wait_children remote
move_to_waiting_children operate
progress remote
update_progress operate
change_priority operate keyed
replay_execution operate keyed
purge_execution operate
set_execution_tags submit
# reads
read_execution_info read
read_execution_state read
read_execution_policy read
read_outcome read
get_execution_namespace read
get_execution_tag read
get_execution_tags read
read_current_attempt_index read
read_total_attempt_count read
read_attempts read
read_execution_context read
describe_execution read
get_execution_result read
read_exec_core_fields admin
read_execution_history read
explain_execution read
# listings
list_executions read rows
list_lane read rows
count_lanes read open
oldest_eligible read open
find_executions read rows
# claims
claim_execution remote
claim_resumed_execution remote
reclaim_execution remote
block_execution_for_admission operate keyed
unblock_execution operate keyed
# admission
read_candidates read
# leases
renew remote
renew_lease operate
revoke_lease operate keyed
list_expired_leases read rows
# lanes
list_lanes read open
get_lane read open
read_settings read open
busiest_partitions read open
set_lane_state operate keyed
set_lane_config operate keyed
# places
lanes_by_partition read open
used_partitions read open
lanes_in_use read open
namespaces_in_use read
# workers
register_worker remote mints=start_id
heartbeat_worker remote
mark_worker_dead remote keyed
drain_worker operate
list_workers read rows
list_worker_leases read rows
# suspensions
suspend remote mints=suspension_id
resume_execution operate keyed
list_suspended read rows
# waitpoints
create_waitpoint remote keyed
close_waitpoint remote keyed
list_pending_waitpoints read
read_last_wait read
observe_signals remote
read_signal read
read_waits read
read_wait_signals read
# signals
deliver_signal signal mints=signal_id bulk
deliver_approval_signal operate bulk
read_waitpoint_token signal
verify_and_deliver signal mints=signal_id bulk
# secrets
rotate_waitpoint_hmac_secret_all admin
list_waitpoint_hmac_kids admin
# streams
append_frames remote needs=seq bulk
read_summary read
read_stream read
tail_stream read waits
# steps
record_step remote bulk
read_steps read
# flows
create_flow submit
submit_flow submit bulk
extend_flow submit bulk
spawn_children remote bulk
resolve_execution_flow_id read
release_flow operate
add_execution_to_flow submit
stage_dependency_edge submit mints=edge_id
apply_dependency_to_child submit
add_dependency submit mints=edge_id
set_edge_group_policy submit
set_flow_tags submit
get_flow_tag read
cancel_flow operate waits
describe_flow read
list_flows read rows
list_members read
describe_edge read
list_edges read
list_outgoing_edges read
list_incoming_edges read
evaluate_flow_eligibility read
get_inputs read
delete_flow operate keyed
flow_ids read rows
drain_flow_cancel operate
drain_cascade operate
replay_flow operate keyed
# budgets
create_budget operate
update_budget_limits operate
delete_budget operate keyed
reset_budget operate keyed
get_budget_status read open
list_budgets read open
report_usage remote keyed
report_usage_admin operate keyed
record_spend operate keyed
release_budget operate keyed
reserve remote
settle remote open
release_reservation remote open
read_budget_usage_and_limits read open
exhausted read open
extend_holds remote
blocked read rows
# quotas
create_quota_policy operate
update_quota_policy operate
get_quota_status read open
list_quota_policies read open
read_quota_policy_limits read open
blocked read rows
# upkeep
flow_backlog read open
expire_execution remote open
# leadership
leaders read open
get_report read open
# meta
ping read open
server_time_ms read open
usage read open
diagnose read
# feeds
partition_feeds read open
worker_feeds read rows
tagged read rows
clock_ms read open
states read open
last_position read open
join_group read
lease_feed read
read read open rows waits
"""
_ABSENT: Final[Any] = object()


class Operation:
    """One operation, how it is called, and how its arguments and its result are encoded."""

    def __init__(self, noun: str, name: str, scope: OperationScope, marks: frozenset[str]) -> None:
        self.noun = noun
        self.name = name
        self.scope: OperationScope = scope
        self.marks = marks
        self.path = f"{ROOT}/{noun}/{name}"
        self.method = getattr(protocols()[noun], name)

    @functools.cached_property
    def minted(self) -> str | None:
        """The argument that the client fills in."""
        return self._marked("mints")

    def repeatable(self, given: Mapping[str, Any]) -> bool:
        """Whether the server recognises a repeat of a call with these arguments."""
        needed = self._marked("needs")
        return needed is None or given.get(needed) is not None

    def _marked(self, mark: str) -> str | None:
        found = [each.partition("=")[2] for each in self.marks if each.startswith(f"{mark}=")]
        return found[0] if found else None

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The operation's parameters, without `self`."""
        return inspect.Signature([*inspect.signature(self.method).parameters.values()][1:])

    @functools.cached_property
    def types(self) -> Mapping[str, Any]:
        """The type of each argument, those of `**options` included."""
        hints = get_type_hints(self.method, include_extras=True)
        found: dict[str, Any] = {}
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                found |= get_type_hints(get_args(hints[name])[0])
            elif parameter.kind is parameter.VAR_POSITIONAL:
                found[name] = tuple[hints[name], ...]
            else:
                found[name] = hints[name]
        return found

    @functools.cached_property
    def result(self) -> Any:
        """The type of the result."""
        return get_type_hints(self.method, include_extras=True)["return"]

    @functools.cached_property
    def decoder(self) -> msgspec.json.Decoder[Any]:
        """Decodes the arguments; those that are not given have the value `_ABSENT`."""
        parameters = self.signature.parameters
        fields: list[Any] = []
        for name, kind in self.types.items():
            known = parameters.get(name)
            needed = known is not None and known.default is known.empty
            needed = needed and known is not None and known.kind is not known.VAR_POSITIONAL
            wire = codec.wire_type(kind)
            fields.append((name, wire) if needed else (name, wire, _ABSENT))
        struct = msgspec.defstruct(self.name, fields, kw_only=True, forbid_unknown_fields=True)
        return codec.decoder(struct)

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name; raises `TypeError` as a local call would."""
        try:
            given = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self.name}() {error}") from None
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
        return {name: codec.encode_as(self.types[name], each) for name, each in given.items()}

    def given(self, decoded: msgspec.Struct) -> dict[str, Any]:
        """The decoded arguments by name."""
        found = ((name, getattr(decoded, name)) for name in decoded.__struct_fields__)
        return {name: value for name, value in found if value is not _ABSENT}

    def call(self, concern: object, given: Mapping[str, Any]) -> Any:
        """Call the operation with positional arguments where possible.

        The layers around an operation find its first arguments by position.
        """
        positional: list[Any] = []
        named = dict(given)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional += named.pop(name, ())
            if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or name not in named:
                break
            positional.append(named.pop(name))
        return getattr(concern, self.name)(*positional, **named)


@functools.cache
def protocols() -> dict[str, Any]:
    """The Protocol of each noun."""
    found = get_type_hints(Backend)
    found["feeds"] = FeedOperations
    return found


@functools.cache
def operations() -> dict[str, dict[str, Operation]]:
    """Every operation of the table, by noun and name."""
    found: dict[str, dict[str, Operation]] = {}
    noun = ""
    for line in _TABLE.strip().splitlines():
        first, second, *marks = line.split(" ")
        if first == "#":
            noun = second
            found[noun] = {}
        else:
            scope = cast("OperationScope", second)
            found[noun][first] = Operation(noun, first, scope, frozenset(marks))
    return found
