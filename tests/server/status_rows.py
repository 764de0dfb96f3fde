"""Every public route with every status it can return, and the request that causes it.

What follows from the kind of a route alone, such as 415 or a malformed id, has no rows here: the
tests make those requests for all routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tests.support import shapes
from tests.support.shapes import LEAST

E, F, B = "/v1/executions/{id}", "/v1/flows/{id}", "/v1/budgets/{id}"
Q, L = "/v1/quotas/{id}", "/v1/lanes/{lane}"
W = f"{E}/waitpoints/{{waitpoint_id}}"
A = f"{E}/attempts/{{idx}}"
CALLBACK = "/v1/callbacks/executions/{id}/waitpoints/{waitpoint_id}"
ROTATE = "/v1/admin/rotate-waitpoint-secret"


class Row(msgspec.Struct, frozen=True):
    """One request, and its answer.

    In paths, queries and bodies `$name` is a fact of the subject.
    """

    expected: str
    """The status, and the kind of an error or what the body of a success contains."""
    subject: str = "nothing"
    body: Any = None
    query: str = ""
    headers: Mapping[str, str] = {}
    repeated: bool = False
    """Whether the same request was sent before."""
    theirs: bool = False
    """Whether the caller may only use other namespaces."""

    @property
    def status(self) -> int:
        return int(self.expected[:3])

    @property
    def word(self) -> str:
        return self.expected[4:]


def known(word: str, *others: str, subject: str = "waiting", code: str = "execution") -> list[Row]:
    """A read of something that exists, and of something that does not."""
    missing = "unknown" if code == "execution" else "nothing"
    found = [Row(f"200 {word}".strip(), subject), Row(f"404 {code}_not_found", missing)]
    return [*found, *(Row(each, subject) for each in others)]


CANCEL = {"execution_id": "$id", "reason": "x"}
LEASE = {"lease_id": "$uuid", "lease_epoch": 1, "attempt_id": "$uuid"}
HELD = LEASE | {"source": "lease_holder"}
FENCE = {name: f"${name}" for name in LEASE}
MEMBER = {"flow_id": "$id", "execution_id": "$execution_id"}
AFTER_GONE = {"depends_on": [{"upstream": "$gone"}]}
NO_CAPABILITY = {"routing_requirements": {"required_capabilities": ["a b"]}}
CLAIM = {"lane_id": "$lane", "worker_instance_id": "w-1", "grant_ttl_ms": 1000}
RECLAIM = CLAIM | {"worker_id": "w"}
REPLAY_ONCE = {"expected_replay_count": 7, "strict": True}
SIGNAL = {
    "execution_id": "$id",
    "waitpoint_id": "$waitpoint_id",
    "signal_id": "$uuid",
    "signal_name": "go",
    "signal_category": "test",
    "source_type": "test",
    "source_identity": "me",
    "target_scope": "waitpoint",
    "waitpoint_token": "$token",
}
GO = {"signal_name": "go"}
ONE_SIGNAL = {"max_signals_per_execution": 1}
TOKEN = {"x-ff-waitpoint-token": "$token"}
EXECUTIONS: dict[str, list[Row]] = {
    "POST /v1/executions": [
        Row("201 Created", body=LEAST),
        Row("200 Duplicate", body=LEAST | {"idempotency_key": "$uuid"}, repeated=True),
        Row("400 invalid_policy_json", body=LEAST | {"policy": {"priority_boost": 1}}),
        Row("404 flow_not_found", body=LEAST | {"flow_id": "$uuid"}),
        Row("409 lane_not_accepting", "disabled", LEAST | {"lane_id": "$lane"}),
        Row("409 flow_already_terminal", "ended", LEAST | {"flow_id": "$id"}),
        Row("400 partition_mismatch", "flow", LEAST | MEMBER | {"execution_id": "$elsewhere"}),
        Row("409 execution_not_in_flow", "flow", LEAST | {"flow_id": "$id"} | AFTER_GONE),
        Row("400 invalid_capabilities", body=LEAST | {"policy": NO_CAPABILITY}),
    ],
    f"POST {E}/cancel": [
        Row("200 Cancelled", "waiting", CANCEL),
        Row("200 Cancelled", "waiting", CANCEL, repeated=True),
        Row("400 invalid_input", "waiting", CANCEL | {"source": "flow_cascade"}),
        Row("404 execution_not_found", "unknown", CANCEL),
        Row("409 execution_not_active", "completed", CANCEL),
        Row("409 stale_lease", "running", CANCEL | HELD),
        Row("409 lease_expired", "expired", CANCEL | HELD | FENCE),
        Row("409 lease_revoked", "revoked", CANCEL | HELD | FENCE),
        Row("400 fence_required", "running", CANCEL | {"source": "lease_holder"}),
        Row("400 partial_fence_triple", "running", CANCEL | HELD | {"attempt_id": None}),
        Row("422 invalid_input", "running", CANCEL | HELD | {"lease_id": "x"}),
    ],
    f"PUT {E}/priority": [
        Row("200 Changed", "waiting", {"new_priority": 5}),
        Row("404 execution_not_found", "unknown", {"new_priority": 5}),
        Row("409 execution_not_eligible", "running", {"new_priority": 5}),
    ],
    f"POST {E}/replay": [
        Row("200 Replayed", "cancelled"),
        Row("404 execution_not_found", "unknown"),
        Row("409 execution_not_terminal", "waiting"),
        Row("409 replay_not_allowed", "cancelled", REPLAY_ONCE),
        Row("409 max_replays_exhausted", "spent"),
        Row("409 deps_not_satisfied", "skipped", {"strict": True}),
    ],
    f"POST {E}/revoke-lease": [
        Row("200 Revoked", "running"),
        Row("200 AlreadySatisfied", "waiting"),
        Row("404 execution_not_found", "unknown"),
    ],
    f"POST {E}/resume": [
        Row("200 Resumed", "parked"),
        Row("404 execution_not_found", "unknown"),
        Row("409 execution_not_suspended", "waiting"),
    ],
    f"PUT {E}/tags": [
        Row("200 Ok", "waiting", {"app.a": "1"}),
        Row("400 invalid_tag_key", "waiting", {"ff.a": "1"}),
        Row("404 execution_not_found", "unknown", {"app.a": "1"}),
    ],
    "GET /v1/executions": [
        Row("200 executions"),
        Row("400 invalid_input", query="state=eligible"),
        Row("400 invalid_cursor", query="cursor=nope"),
    ],
    f"GET {E}": known("state_vector"),
    f"GET {E}/state": [*known("waiting"), Row("200 cancelled", "cancelled", query="wait_ms=5")],
    f"GET {E}/result": [
        Row("200", "completed"),
        Row("202 public_state", "waiting", query="wait_ms=1"),
        Row("404 execution_not_found", "unknown"),
        Row("404 result_not_found", "cancelled"),
    ],
    f"GET {E}/outcome": [
        Row("200 terminal_outcome", "completed"),
        Row("202 public_state", "waiting"),
        Row("404 execution_not_found", "unknown"),
    ],
    f"GET {E}/describe": known("last_mutation_at"),
    f"GET {E}/history": known("events"),
    f"GET {E}/steps": [
        *known("steps"),
        Row("400 invalid_cursor", "waiting", query="cursor=nope"),
        Row("400 invalid_input", "waiting", query="limit=-1"),
    ],
    f"GET {E}/tags": known(""),
    f"GET {E}/explain": known("lane_state"),
    "POST /v1/bulk/executions": [
        Row("200 results", body=[LEAST]),
        Row("400 invalid_input", body=[LEAST] * 1001),
    ],
    "POST /v1/bulk/cancel": [Row("200 results", "waiting", [CANCEL])],
    f"GET {E}/pending-waitpoints": known(""),
    f"GET {W}/token": [
        Row("200 token", "parked"),
        Row("404 waitpoint_token_not_found", "unparked"),
        Row("404 waitpoint_token_not_found", "unknown"),
    ],
    f"POST {E}/signal": [
        Row("200 Accepted", "parked", SIGNAL),
        Row("200 Duplicate", "parked", SIGNAL | {"idempotency_key": "$uuid"}, repeated=True),
        Row("400 missing_token", "parked", SIGNAL | {"waitpoint_token": ""}),
        Row("400 invalid_token", "parked", SIGNAL | {"waitpoint_token": "x"}),
        Row("404 execution_not_found", "unknown", SIGNAL),
        Row("409 target_not_signalable", "unparked", SIGNAL),
        Row("400 token_expired", "outdated", SIGNAL),
        Row("400 signal_limit_exceeded", "signalled", SIGNAL | ONE_SIGNAL),
        Row("400 payload_too_large", "parked", SIGNAL | {"payload_b64": "AAAA" * 22_000}),
        Row("409 waitpoint_closed", "closed", SIGNAL),
    ],
    f"POST {W}/approve": [
        Row("200 Accepted", "parked", GO),
        Row("404 execution_not_found", "unknown", GO),
        Row("404 waitpoint_not_found", "waiting", GO),
        Row("409 target_not_signalable", "unparked", GO),
    ],
    f"POST {W}/close": [
        Row("200 Closed", "pending"),
        Row("200 Closed", "pending", repeated=True),
        Row("404 waitpoint_not_found", "unknown"),
        Row("409 waitpoint_not_open", "damaged"),
    ],
    f"POST {CALLBACK}": [
        Row("200 Accepted", "parked", GO, headers=TOKEN),
        Row("401 missing_token", "parked", GO),
        Row("401 invalid_token", "parked", GO, headers={"x-ff-waitpoint-token": "x"}),
        Row("401 invalid_token", "unknown", GO, headers=TOKEN),
        Row("409 target_not_signalable", "unparked", GO, headers=TOKEN),
        Row("401 token_expired", "outdated", GO, headers=TOKEN),
        Row("401 invalid_token", "parked", GO, headers={"x-ff-waitpoint-token": "k9:" + "0" * 40}),
    ],
    "GET /v1/suspended": [Row("200 suspensions"), Row("400 invalid_cursor", query="cursor=nope")],
    f"GET {A}/stream": [
        Row("200 frames", "unknown"),
        Row("400 invalid_input", "unknown", query="limit=1001"),
        Row("404 execution_not_found", "waiting", theirs=True),
    ],
    f"GET {A}/stream/tail": [
        Row("200 frames", "unknown"),
        Row("400 invalid_input", "unknown", query="after=end"),
        Row("404 execution_not_found", "waiting", theirs=True),
    ],
    f"GET {A}/summary": [
        Row("200 document", "summed"),
        Row("404 summary_not_found", "running"),
        Row("404 execution_not_found", "waiting", theirs=True),
    ],
    "POST /v1/workers/{worker_id}/claim": [
        Row("200 grant_key", "waiting", CLAIM),
        Row("204", body=CLAIM),
        Row("400 invalid_input", body=CLAIM | {"grant_ttl_ms": 0}),
        Row("400 invalid_capabilities", body=CLAIM | {"capabilities": ["a,b"]}),
    ],
    f"POST {E}/reclaim": [
        Row("200 status", "revoked", RECLAIM),
        Row("400 invalid_input", "revoked", RECLAIM | {"grant_ttl_ms": 60_001}),
        Row("404 execution_not_found", "unknown", RECLAIM),
        Row("409 grant_already_exists", "granted", RECLAIM),
        Row("400 invalid_capabilities", "revoked", RECLAIM | {"worker_capabilities": ["a,b"]}),
    ],
    f"POST {E}/block": [
        Row("200 Blocked", "waiting"),
        Row("400 invalid_blocking_reason", "waiting", {"reason": "x"}),
        Row("404 execution_not_found", "unknown"),
        Row("409 execution_not_eligible", "blocked"),
        Row("409 execution_not_active", "completed"),
    ],
    f"POST {E}/unblock": [
        Row("200 Unblocked", "blocked"),
        Row("404 execution_not_found", "unknown"),
        Row("409 execution_not_eligible", "waiting"),
    ],
    f"GET {E}/events": [
        Row("200", "waiting"),
        Row("400 invalid_cursor", "waiting", query="cursor=nope"),
        Row("404 execution_not_found", "unknown"),
        Row("410 cursor_expired", "trimmed", query="cursor=$cursor"),
    ],
    f"GET {A}/stream/events": [
        Row("200", "waiting"),
        Row("400 invalid_cursor", "waiting", query="cursor=start"),
        Row("404 execution_not_found", "unknown"),
    ],
    "GET /v1/events": [
        Row("200"),
        Row("400 invalid_input", query="families=nope"),
        Row("410 cursor_expired", "trimmed_feed", query="cursor=$cursor"),
    ],
}
HANDLE = {"handle": "$handle"}


def items(**fields: Any) -> list[Row]:
    """A call of a remote worker about one attempt."""
    body = {"items": [HANDLE | fields]}
    return [Row("200 results", "running", body), Row("400 invalid_input", body={"items": []})]


ME = {"worker_instance_id": "w-1", "lanes": ["$lane"]}
REMOTE: dict[str, list[Row]] = {
    "POST /v1/remote/claim": [
        Row("200 claims", "waiting", ME),
        Row("400 invalid_input", body=ME | {"lanes": [""]}),
    ],
    "POST /v1/remote/renew": items(),
    "POST /v1/remote/complete": items(result=[1]),
    "POST /v1/remote/fail": items(reason="x"),
    "POST /v1/remote/delay": items(delay_ms=5),
    "POST /v1/remote/suspend": items(waitpoint_key="k"),
    "POST /v1/remote/frames": items(frames=[{"text": "x"}], seq=1),
    "POST /v1/remote/progress": items(pct=5),
    "POST /v1/remote/usage": items(budget="b", dimensions={"tokens": 1}, dedup_key="k"),
}
NEW_FLOW = {"flow_id": "$uuid", "flow_kind": "etl", "namespace": "default"}
EDGE = {"flow_id": "$id", "edge_id": "$uuid"}
B_TO_A = EDGE | {"upstream_execution_id": "$b", "downstream_execution_id": "$a"}
A_TO_B = EDGE | {"upstream_execution_id": "$a", "downstream_execution_id": "$b"}
NO_ENDS = EDGE | dict.fromkeys(
    ("upstream_execution_id", "downstream_execution_id"), "$execution_id"
)
STOP = {"flow_id": "$id", "reason": "x", "cancellation_policy": "cancel_all"}
NODE = {"key": "n", "execution_kind": "x"}
GRAPH = NEW_FLOW | {"nodes": [NODE]}
ANY = {"kind": "any_of", "on_satisfied": "let_run"}
FLOWS: dict[str, list[Row]] = {
    "POST /v1/flows": [
        Row("201 Created", body=NEW_FLOW),
        Row("200 AlreadySatisfied", body=NEW_FLOW, repeated=True),
        Row("400 invalid_input", "flow", NEW_FLOW | {"flow_id": "$id", "flow_kind": "other"}),
        Row("400 invalid_input", "flow", NEW_FLOW | {"flow_id": "$id", "namespace": "other"}),
    ],
    "GET /v1/flows": [Row("200 flows"), Row("400 invalid_input", query="status=nope")],
    f"GET {F}": known("edge_groups", subject="flow", code="flow"),
    f"GET {F}/summary": known("total_members", subject="flow", code="flow"),
    f"DELETE {F}": [
        *known("Deleted", subject="finished", code="flow"),
        Row("409 flow_not_terminal", "flow"),
    ],
    f"PUT {F}/tags": [
        Row("200 Ok", "flow", {"app.a": "1"}),
        Row("400 invalid_tag_key", "flow", {"ff.a": "1"}),
        Row("404 flow_not_found", body={"app.a": "1"}),
    ],
    f"POST {F}/members": [
        Row("201 Added", "joinable", MEMBER),
        Row("200 AlreadyMember", "joinable", MEMBER, repeated=True),
        Row("404 flow_not_found", body=MEMBER),
        Row("404 execution_not_found", "flow", MEMBER | {"execution_id": "$gone"}),
        Row("409 already_member_of_different_flow", "promised", MEMBER),
        Row("409 flow_already_terminal", "ended", MEMBER),
        # Before anything is looked up.
        Row("400 partition_mismatch", body=MEMBER | {"execution_id": "$elsewhere"}),
        Row("400 partition_mismatch", "flow", MEMBER | {"execution_id": "$elsewhere"}),
    ],
    f"GET {F}/members": known("members", subject="flow", code="flow"),
    f"GET {F}/edges": [
        *known("edges", subject="flow", code="flow"),
        Row("400 invalid_input", "flow", query="upstream_execution_id=x"),
    ],
    f"POST {F}/edges": [
        Row("201 Staged", "loose", A_TO_B),
        Row("200 AlreadyStaged", "loose", A_TO_B, repeated=True),
        Row("404 flow_not_found", body=A_TO_B),
        Row("409 stale_graph_revision", "loose", A_TO_B | {"expected_graph_revision": 99}),
        Row("409 self_referencing_edge", "loose", NO_ENDS),
        Row("409 dependency_already_exists", "staged", A_TO_B | {"input_name": "x"}),
        Row("409 execution_not_in_flow", "loose", A_TO_B | {"downstream_execution_id": "$gone"}),
        Row("409 flow_already_terminal", "ended", A_TO_B),
        Row("400 invalid_input", "loose", A_TO_B | {"dependency_kind": "nope"}),
        Row("400 invalid_input", "loose", A_TO_B | {"input_name": "a b"}),
        Row("409 cycle_detected", "flow", B_TO_A),
    ],
    f"POST {F}/edges/apply": [
        Row("200 Applied", "staged", EDGE),
        Row("200 AlreadyApplied", "staged", EDGE, repeated=True),
        Row("400 invalid_dependency", "loose", EDGE),
        Row("404 flow_not_found", body=EDGE),
        Row("409 terminal", "overtaken", EDGE),
        Row("400 invalid_dependency", "staged", EDGE | {"upstream_execution_id": "$gone"}),
        Row("400 invalid_dependency", "staged", EDGE | {"downstream_execution_id": "$a"}),
        Row("400 invalid_dependency", "staged", EDGE | {"dependency_kind": "failure_only"}),
        Row("400 invalid_dependency", "staged", EDGE | {"data_passing_ref": "x"}),
        Row("400 invalid_input", "staged", EDGE | {"dependency_kind": "nope"}),
        # An edge has no revision of its own, so there is nothing to compare it with.
        Row("200 Applied", "staged", EDGE | {"graph_revision": 99}),
        Row("409 flow_already_terminal", "abandoned", EDGE),
    ],
    f"POST {F}/cancel": [
        Row("200 Cancelled", "flow", STOP, query="wait=true"),
        Row("400 invalid_grace_ms", "flow", STOP | {"grace_ms": 2**60}),
        Row("404 flow_not_found", body=STOP),
    ],
    f"POST {F}/release": known("Released", subject="flow", code="flow"),
    f"POST {F}/replay": known("Replayed", subject="finished", code="flow"),
    f"GET {F}/events": [
        *known("", subject="flow", code="flow"),
        Row("400 invalid_cursor", "flow", query="cursor=nope"),
        Row("410 cursor_expired", "trimmed_flow", query="cursor=$cursor"),
    ],
    "POST /v1/flows/submit": [
        Row("201 Submitted", body=GRAPH),
        Row("200 AlreadySubmitted", body=GRAPH, repeated=True),
        Row("400 invalid_input", body=GRAPH | {"nodes": [NODE | {"colour": "red"}]}),
        Row("409 flow_submission_conflict", "flow", GRAPH | {"flow_id": "$id"}),
    ],
    f"POST {F}/extend": [
        Row("201 Extended", "flow", {"nodes": [NODE]}),
        Row("200 AlreadyExtended", "flow", {"nodes": [NODE]}, repeated=True),
        Row("400 invalid_input", "flow", {}),
        Row("404 flow_not_found", body={"nodes": [NODE]}),
        Row("409 flow_already_terminal", "ended", {"nodes": [NODE]}),
    ],
    f"PUT {F}/groups/{{execution_id}}": [
        Row("200 Set", "loose", ANY),
        Row("200 AlreadySet", "loose", ANY, repeated=True),
        Row("400 invalid_input", "loose", ANY | {"kind": "quorum"}),
        Row("404 flow_not_found", body=ANY),
        Row("409 flow_already_terminal", "ended", ANY),
        Row("409 execution_not_in_flow", "stranger", ANY),
    ],
}
BUDGET = shapes.BUDGET | {"budget_id": "$uuid"}
TWO_LISTS = {"hard_limits": [1] * 65, "soft_limits": [0] * 65}
MANY = {"dimensions": [f"d{n}" for n in range(65)], **TWO_LISTS}
USAGE = {"dimensions": {"tokens": 1}}
LIMITS = {"hard_limits": {"tokens": 20}}
QUOTA = {
    "quota_policy_id": "$uuid",
    "window_seconds": 60,
    "max_requests_per_window": 5,
    "max_concurrent": 1,
}
DEPLOYMENT: dict[str, list[Row]] = {
    "POST /v1/budgets": [
        Row("201 Created", body=BUDGET),
        Row("200 AlreadySatisfied", body=BUDGET, repeated=True),
        Row("400 invalid_input", body=BUDGET | {"soft_limits": []}),
        Row("400 invalid_budget_scope", body=BUDGET | {"scope_type": ""}),
        Row("400 invalid_budget_scope", body=BUDGET | {"scope_id": "x" * 257}),
        Row("400 invalid_input", body=BUDGET | {"hard_limits": [2**53]}),
        Row("400 invalid_input", body=BUDGET | MANY),
    ],
    "GET /v1/budgets": [Row("200 budgets"), Row("400 invalid_cursor", query="cursor=nope")],
    f"GET {B}": known("usage", subject="budget", code="budget"),
    f"POST {B}/usage": [
        Row("200 Ok", "budget", USAGE),
        Row("200 HardBreach", "budget", {"dimensions": {"tokens": 11}}),
        Row("404 budget_not_found", body=USAGE),
        Row("400 invalid_input", "budget", {"dimensions": {"tokens": 2**53}}),
        Row("422 invalid_input", "budget", {"dimensions": {"tokens": 1.5}}),
        Row("422 invalid_input", "budget", {"dimensions": None}),
    ],
    f"POST {B}/reset": known("Reset", subject="budget", code="budget"),
    f"PUT {B}": [
        Row("200 Updated", "budget", LIMITS),
        Row("400 invalid_input", "budget", {}),
        Row("404 budget_not_found", body=LIMITS),
    ],
    f"DELETE {B}": [
        *known("Deleted", subject="budget", code="budget"),
        Row("409 budget_attach_conflict", "attached"),
        Row("200 Deleted", "attached", query="force=true"),
    ],
    "POST /v1/quotas": [
        Row("201 Created", body=QUOTA),
        Row("200 AlreadySatisfied", body=QUOTA, repeated=True),
        Row("400 invalid_quota_spec", body=QUOTA | {"window_seconds": 2**60}),
    ],
    "GET /v1/quotas": [Row("200 quotas"), Row("400 invalid_cursor", query="cursor=nope")],
    f"GET {Q}": known("window_count", subject="quota", code="quota_policy"),
    f"PUT {Q}": [
        Row("200 Updated", "quota", {"jitter_ms": 5}),
        Row("400 invalid_input", "quota", {}),
        Row("404 quota_policy_not_found", body={"jitter_ms": 5}),
    ],
    "GET /v1/lanes": [Row("200 lanes"), Row("400 invalid_cursor", query="cursor=%00")],
    f"GET {L}": known("counts", subject="lane_of_its_own", code="lane"),
    f"PUT {L}/state": [
        Row("200 Set", body={"state": "paused"}),
        Row("400 invalid_input", body={"state": "nope"}),
    ],
    f"PUT {L}/config": [
        Row("200 Set", body={"reclaim_grace_ms": 5}),
        Row("400 invalid_input", body={}),
    ],
    "GET /v1/workers": [Row("200 workers")],
    "GET /v1/workers/{instance}/leases": [Row("200 leases")],
    "GET /v1/leases/expired": [Row("200 leases"), Row("400 invalid_cursor", query="cursor=nope")],
    "POST /v1/workers/{instance}/drain": [Row("200 NotRegistered")],
    "POST /v1/workers/{instance}/dead": [Row("200 NotRegistered")],
    "GET /v1/capabilities": [Row("200 supports")],
    f"POST {ROTATE}": [
        Row("200 rotated", "secret", {"new_kid": "$uuid", "new_secret_hex": "cd" * 32}),
        Row("400 invalid_kid", "secret", {"new_kid": "", "new_secret_hex": "cd" * 32}),
        Row("400 invalid_secret_hex", "secret", {"new_kid": "k9", "new_secret_hex": "z"}),
        Row("409 rotation_conflict", "secret", {"new_kid": "$kid", "new_secret_hex": "cd" * 32}),
    ],
    "GET /v1/admin/rotations/{id}": known("status", subject="rotation", code="rotation"),
    "GET /v1/admin/waitpoint-kids": [Row("200 current_kid", "secret")],
    "GET /v1/admin/scanners": [Row("200 scanners")],
    "POST /v1/admin/scanners/{name}/run": known("Ran", subject="scanner", code="scanner"),
    **{key: [Row("200 status")] for key in ("GET /livez", "GET /healthz", "GET /readyz")},
    "GET /metrics": [Row("200")],
    "GET /openapi.json": [Row("200 paths")],
    "GET /docs": [Row("200")],
}
ROWS = EXECUTIONS | REMOTE | FLOWS | DEPLOYMENT
STOPPING = (
    *(f"GET {A}/stream", f"GET {A}/stream/tail", f"GET {A}/stream/events", f"GET {E}/events"),
    *(f"GET {F}/events", "GET /v1/events", "POST /v1/remote/claim", "GET /readyz"),
)
"""Routes that answer 503 while the server stops."""
CUT_OFF = ("GET /healthz", "GET /readyz", f"POST {ROTATE}")
"""Routes that answer 503 without a connection to Valkey."""
LATE = (f"POST {F}/cancel", f"POST {ROTATE}")
"""Routes with a deadline."""
