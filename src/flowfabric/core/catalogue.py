"""The error catalogue: every code with its class, group, HTTP status and hint.

A line `# group status` starts a group. Each code has one line: `code class[/status] hint`, with a
status only where it differs from the group's.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class ErrorClass(StrEnum):
    """What a caller should do with an error."""

    TERMINAL = "T"  #: do not retry
    RETRYABLE = "R"  #: back off, or send the work elsewhere
    INFORMATIONAL = "I"  #: treat as done, or skip
    COOPERATIVE = "C"  #: do the prescribed action, then stop
    EMPTY = "E"  #: nothing there, as expected
    SOFT = "S"  #: warn and continue
    BUG = "B"  #: report it


class CatalogueEntry(NamedTuple):
    """One error code."""

    code: str
    error_class: ErrorClass
    group: str
    http_status: int
    hint: str


_CODES = """
# not_found 404
execution_not_found T Check the id; a finished execution is deleted when its retention ends.
flow_not_found T Check the flow id; create the flow before adding to it.
attempt_not_found T Check the attempt index; it must be below the execution's attempt count.
budget_not_found T Check the name or id, or create the budget first.
reservation_not_found T The hold was settled, released or never made; reserve again.
quota_policy_not_found T Check the name or id, or create the quota first.
lane_not_found T Check the lane name; a lane exists once something was submitted to it.
waitpoint_not_found R Check the waitpoint id; if it was just created, repeat the call.
result_not_found T The execution has not finished, did not succeed, or has no result.
summary_not_found T This attempt wrote no summary frames.
waitpoint_token_not_found T The waitpoint is unknown, closed or belongs to another execution.
rotation_not_found T Check the rotation id; records are kept for 24 hours.
scanner_not_found T Check the name; the reference lists all scanners.
no_eligible_execution E No work is waiting here; try again later.
stream_not_found E The attempt wrote no output.
# validation 400
invalid_input T Correct the named field and call again.
invalid_cursor T Start again without a cursor, or pass the one returned last, unchanged.
invalid_policy_json T Correct the named policy field and submit again.
invalid_capabilities T Pass a list such as ["gpu"], without commas, spaces or the prefix task:.
invalid_tag_key T Use keys such as app.name: lower case, digits, underscores, one dot; not ff.*.
partition_mismatch T Set FF_*_PARTITIONS to the stored counts; create a member's id for its flow.
payload_too_large T Store the data elsewhere and pass a reference, or raise the limit.
fence_required T Pass the lease fence of the claimed task.
partial_fence_triple T Pass lease_id, lease_epoch and attempt_id together.
handle_from_other_backend T Use the handle with the backend that issued it.
capability_mismatch R Leave it to a worker that offers the missing capabilities.
invalid_blocking_reason T Use one of the documented blocking reasons.
invalid_lease_for_suspend T Suspend only with the lease that is held now.
invalid_waitpoint_key T Pass the key the waitpoint was created with.
waitpoint_not_token_bound T Create the waitpoint through the engine so that it carries a token.
invalid_waitpoint_for_execution T Use a waitpoint of this execution.
additional_waitpoint_binding_malformed T Give every extra waitpoint an id and a key.
use_pending_with_extras_unsupported T Suspend on the pending waitpoint alone, or on new ones only.
missing_token T Pass the waitpoint token with the signal.
invalid_token T Pass the token exactly as it was handed out for this waitpoint.
token_expired T Fetch a new token for the waitpoint; its signing key was retired.
tag_limit_exceeded T Use fewer or shorter tags; store the data elsewhere and tag a reference.
batch_too_large T Send fewer items or fewer bytes per call.
lane_limit_exceeded T Reuse a lane; a lane that stays empty is removed within 15 minutes.
signal_limit_exceeded T Send fewer signals, or raise max_signals_per_execution in the policy.
signal_bytes_exceeded T Store the data elsewhere and send a reference with the signal.
waitpoint_limit_exceeded T Reuse waitpoints, or split the work into child executions.
invalid_kid T Key ids have 1 to 64 letters, digits, dots, underscores or hyphens.
invalid_secret_hex T Pass the secret as an even number of hex digits, at least 16 bytes.
invalid_grace_ms T Pass a whole number of milliseconds from 0 to 2^53 - 1.
retention_limit_exceeded T Send smaller frames, or trim the summary.
invalid_frame_type S Use 1 to 128 printable bytes as the frame type.
invalid_budget_scope T Use a documented scope and give its target id.
invalid_quota_spec T Use whole numbers from 0; a limit of 0 means no limit.
invalid_dependency T Name two members of this flow.
invalid_args T Correct the arguments of the flow call.
step_limit_exceeded T Record fewer steps, or split the work into child executions.
invalid_offset T Pass an offset returned by an earlier read.
# auth 401
unauthorized T/401 Send a valid API token.
forbidden T/403 Use a token that is allowed to do this.
# contention 409
execution_not_active T Stop work: the execution is no longer active.
execution_not_eligible I Skip it: the execution is not waiting to be claimed.
execution_not_in_eligible_set I Skip it: it is no longer in the queue.
grant_already_exists I Skip it: another worker holds a grant.
execution_not_reclaimable I Skip it: its lease is still valid, or it has finished.
no_active_lease I Nothing to revoke: the execution has no lease.
use_claim_resumed_execution R Claim it with claim_resumed_execution.
not_a_resumed_execution R Claim it with claim_execution.
execution_being_deleted R Old data of this id is still being deleted; repeat the call.
execution_not_leaseable R Claim another execution.
lease_conflict R Ask for a new grant.
invalid_claim_grant R Ask for a new grant.
claim_grant_expired R Ask for a new grant and claim at once.
lane_placement_changed R The lane was spread over a different number of partitions; repeat the call.
stale_graph_revision R Read the flow again and repeat with its current revision.
idempotency_in_progress R The first request with this key is still running; repeat shortly.
waitpoint_pending_use_buffer_script R Send the signal again; pending waitpoints buffer signals.
execution_not_eligible_for_attempt R Claim another execution.
# conflict 409
self_referencing_edge T An execution cannot depend on itself.
cycle_detected T Remove the edge that closes the cycle.
dependency_already_exists T The edge exists; use it, or pass another id or input name.
already_member_of_different_flow T An execution belongs to only one flow; submit a new execution.
execution_already_in_flow T The execution is already a member.
flow_submission_conflict T This flow id was submitted with other content; use a new id.
waitpoint_already_exists I Use the existing waitpoint.
rotation_conflict T This key id holds another secret; rotate with a new key id.
budget_attach_conflict T Raise its limit, or force the deletion: the executions can then start.
active_attempt_exists B Report this: an attempt is running outside a lease.
idempotency_conflict T This key was used for another request; use a new key.
duplicate_signal I The signal was delivered before.
quota_attach_conflict T Detach the quota policy first.
# state 409
stale_lease T Stop work: another worker owns the execution.
lease_expired T Stop work: the lease expired before it was renewed.
lease_revoked T Stop work: an operator revoked the lease.
execution_not_terminal T Wait until the execution finishes, or cancel it.
max_replays_exhausted T Submit a new execution, or raise max_replay_count in the policy.
replay_not_allowed T The replay count is not the expected one; read the execution again.
max_retries_exhausted T The execution lost its worker too often; replay it to run it again.
lane_not_accepting T Submit to another lane; `flowfabric lane resume LANE` reopens this one.
attempt_not_started T Claim the execution first.
attempt_already_terminal I The attempt has ended; nothing to do.
target_not_signalable T The execution is not waiting; do not send this signal again.
waitpoint_closed I The wait has ended; nothing to do.
execution_not_suspended I The execution is not suspended; nothing to do.
already_suspended I The execution is suspended; nothing to do.
already_satisfied I The condition is met; nothing to do.
waitpoint_not_pending I The waitpoint is in use or closed.
waitpoint_not_open I The waitpoint is closed.
pending_waitpoint_expired I Create a new waitpoint.
stream_closed T Stop writing: the attempt has ended.
stale_owner_cannot_append T Stop work: another worker owns the execution.
flow_already_terminal T The flow was cancelled; create a new one.
flow_not_terminal T Wait until the flow has ended, or cancel it.
execution_not_in_flow T Name a member of this flow.
not_runnable T Dependencies can only be added before the execution is claimed.
terminal T The execution has finished.
not_blocked_by_deps I The execution waits for no dependency.
deps_not_satisfied I Dependencies are still open.
budget_exceeded C Spend less, raise the limit of the budget, or wait until it is reset.
budget_soft_exceeded I Spending passed the soft limit; work may continue.
cursor_expired T/410 Events after this cursor were trimmed; resume from the oldest event.
resume_condition_not_met I More signals are needed.
ok_already_applied I The call was applied before; nothing to do.
stream_already_closed I The stream is closed; nothing to do.
budget_override_not_allowed T This budget does not allow an override.
# limit 429
rate_limit_exceeded R Wait until the current rate window has passed.
concurrency_limit_exceeded R Wait until running work of this quota finishes.
signature_limit_exceeded R Use fewer different sets of required capabilities on this lane.
resource_exhausted R Wait for the given time and repeat the call, or raise the limit.
worker_at_capacity R Wait until a running task finishes, or raise max_concurrent_tasks.
client_rate_limited R Slow down, or raise the client's rate limit.
# bug 500
attempt_not_in_created_state B Report this: the attempt is not in the expected state.
invariant_violation B Report this with the message: it is a bug in the engine.
# corruption 500
corruption T Stored data is unreadable; inspect the named field before repairing it.
# key_store 503
hmac_secret_not_initialized T Set FF_WAITPOINT_HMAC_SECRET and run `flowfabric doctor --prepare`.
invalid_secret T The stored signing secret is broken; rotate to a new key.
# availability 503
unavailable T The backend does not support this operation, or the process is shutting down.
timeout T/504 Decide whether to repeat; raise the deadline if the operation needs longer.
retry_exhausted R/500 Too many calls change the same data; wait and repeat the call.
transport T/500 Check that Valkey is reachable and healthy.
library_version_conflict T Upgrade this process: the server runs a newer function library.
valkey_version_too_low T Use Valkey 8.0 or newer.
# subscriptions 503
stream_disconnected R Subscribe again from the given cursor.
stream_backpressure I The consumer is slow; read faster or filter more.
"""

_DETAIL_WORDS: Mapping[str, str] = {
    "Empty": "it must not be empty",
    "TooLong": "the limit is 64 bytes",
    "NonPrintable": "use printable ASCII characters only",
    "InvalidUuid": "a UUID has 32 lower-case hex digits, in groups of 8-4-4-4-12",
    "MissingTag": "an execution id looks like 42-<uuid> or {fp:42}:<uuid>",
    "InvalidPartitionIndex": "the number in {fp:N} is 0 to 65535, without leading zeros",
    "MissingBraces": "a partition key looks like {fp:42}",
    "MalformedBody": "a partition key looks like {fp:42}",
    "UnknownFamilyPrefix": "a partition key begins with {fp:, {b: or {q:",
    "InvalidIndex": "the number is 0 to 65535, without leading zeros",
    "not_array": "it must be a list",
    "non_string_token": "every capability must be text",
    "empty_token": "a capability must not be empty",
    "comma_in_token": "a capability must not contain a comma",
    "control_or_whitespace": "a capability must not contain spaces or control characters",
    "too_many_tokens": "the limit is 256 capabilities",
    "too_many_bytes": "the limit is 4096 bytes for all capabilities together",
}
_word = re.compile(r"[a-z_]+: ?([A-Za-z_]+)(?:\([0-9]+\))?(?=$|: ['\"])").match


def meaning(detail: str) -> str:
    """The meaning of the word in a detail; empty if it has none."""
    found = _word(detail)
    return _DETAIL_WORDS.get(found[1], "") if found else ""


def explained(detail: str) -> str:
    """A detail with the meaning of its word.

    >>> explained("lane_id: Empty")
    'lane_id: Empty (it must not be empty)'
    """
    added = meaning(detail)
    return f"{detail} ({added})" if added else detail


def _build() -> dict[str, CatalogueEntry]:
    entries: dict[str, CatalogueEntry] = {}
    group, group_status = "", "0"
    for line in _CODES.strip().splitlines():
        code, mark, hint = line.split(" ", 2)
        if code == "#":
            group, group_status = mark, hint
            continue
        letter, _, status = mark.partition("/")
        entries[code] = CatalogueEntry(
            code, ErrorClass(letter), group, int(status or group_status), hint
        )
    return entries


CATALOGUE: dict[str, CatalogueEntry] = _build()
OURS = frozenset(
    {
        *("tag_limit_exceeded", "batch_too_large", "lane_limit_exceeded", "signal_bytes_exceeded"),
        *("waitpoint_limit_exceeded", "signature_limit_exceeded"),
        *("execution_being_deleted", "lane_placement_changed"),
    }
)
"""Codes that are not in the catalogue of 02 §16."""


class FaultKind(NamedTuple):
    """One `kind` of transport fault."""

    retryable: bool
    passing: bool
    """It usually ends by itself within seconds, so the transport repeats the call."""
    hint: str


# `P`: passes by itself; `R`: retryable after someone has acted; `T`: terminal.
_FAULTS = """
transport P Check that Valkey is reachable.
protocol T Check that the address is a Valkey server and not a proxy or another service.
timeout P Valkey did not answer in time; check its load, or raise the deadline.
auth T Check the user name, the password and the ACL.
cluster P The cluster is moving slots or is down; retry shortly.
busy_loading P Valkey is loading its data; retry shortly.
script_not_loaded T The function library is missing and did not load; run `flowfabric doctor`.
other T Check the server's message and its log.
out_of_memory R Valkey is at maxmemory; free memory or raise the limit, then retry.
read_only P This node is a replica; a failover may be under way, retry shortly.
busy_script P A long script blocks Valkey; retry shortly.
cannot_persist R Valkey cannot write to its disk, so it refuses writes; free some space.
no_replicas P Too few replicas are in sync (min-replicas-to-write); retry when they are.
"""

FAULT_KINDS: dict[str, FaultKind] = {
    kind: FaultKind(mark != "T", mark == "P", hint)
    for kind, mark, hint in (line.split(" ", 2) for line in _FAULTS.strip().splitlines())
}
