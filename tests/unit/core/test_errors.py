"""The exception tree and the error catalogue."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest

from flowfabric.core import errors
from flowfabric.core.catalogue import CATALOGUE, FAULT_KINDS, OURS, ErrorClass
from flowfabric.core.errors import (
    BudgetExceeded,
    ConfigError,
    CorruptionError,
    EngineError,
    FlowFabricError,
    LeaseLost,
    NotFoundError,
    PermanentError,
    PossiblySucceeded,
    ReplyError,
    RetryableError,
    StateError,
    TaskFinishedError,
    TimeoutError_,
    TransportError,
    UnavailableError,
    UnknownCodeError,
    ValidationError,
    WorkerAtCapacity,
    engine_error,
    invalid_input,
)
from flowfabric.core.ids import IdParseError

# The catalogue of 02 §16: group, HTTP status, class, codes.
SPECIFIED = """
not_found 404 T execution_not_found flow_not_found attempt_not_found budget_not_found
not_found 404 T reservation_not_found quota_policy_not_found lane_not_found
not_found 404 R waitpoint_not_found
not_found 404 T result_not_found summary_not_found waitpoint_token_not_found rotation_not_found
not_found 404 T scanner_not_found
validation 400 T invalid_input invalid_cursor invalid_policy_json invalid_capabilities
validation 400 T invalid_tag_key partition_mismatch payload_too_large fence_required
validation 400 T partial_fence_triple handle_from_other_backend invalid_blocking_reason
validation 400 R capability_mismatch
validation 400 T invalid_lease_for_suspend invalid_waitpoint_key waitpoint_not_token_bound
validation 400 T invalid_waitpoint_for_execution additional_waitpoint_binding_malformed
validation 400 T use_pending_with_extras_unsupported missing_token invalid_token token_expired
validation 400 T signal_limit_exceeded invalid_kid invalid_secret_hex invalid_grace_ms
validation 400 T retention_limit_exceeded invalid_budget_scope invalid_quota_spec
validation 400 T invalid_dependency invalid_args step_limit_exceeded
validation 400 S invalid_frame_type
auth 401 T unauthorized
auth 403 T forbidden
contention 409 T execution_not_active
contention 409 I execution_not_eligible execution_not_in_eligible_set grant_already_exists
contention 409 I execution_not_reclaimable no_active_lease
contention 409 R use_claim_resumed_execution not_a_resumed_execution execution_not_leaseable
contention 409 R lease_conflict invalid_claim_grant claim_grant_expired stale_graph_revision
contention 409 R idempotency_in_progress
conflict 409 T self_referencing_edge cycle_detected dependency_already_exists
conflict 409 T already_member_of_different_flow execution_already_in_flow
conflict 409 T flow_submission_conflict rotation_conflict budget_attach_conflict
conflict 409 T idempotency_conflict
conflict 409 I waitpoint_already_exists
conflict 409 B active_attempt_exists
state 409 T stale_lease lease_expired lease_revoked execution_not_terminal max_replays_exhausted
state 409 T replay_not_allowed max_retries_exhausted lane_not_accepting attempt_not_started
state 409 I attempt_already_terminal waitpoint_closed execution_not_suspended already_suspended
state 409 I already_satisfied waitpoint_not_pending waitpoint_not_open pending_waitpoint_expired
state 409 T target_not_signalable stream_closed stale_owner_cannot_append flow_already_terminal
state 409 T flow_not_terminal execution_not_in_flow not_runnable terminal
state 409 I not_blocked_by_deps deps_not_satisfied budget_soft_exceeded
state 409 C budget_exceeded
state 410 T cursor_expired
limit 429 R rate_limit_exceeded concurrency_limit_exceeded resource_exhausted
limit 429 R worker_at_capacity client_rate_limited
bug 500 B attempt_not_in_created_state invariant_violation
corruption 500 T corruption
key_store 503 T hmac_secret_not_initialized invalid_secret
availability 503 T unavailable library_version_conflict valkey_version_too_low
availability 504 T timeout
availability 500 R retry_exhausted
availability 500 T transport
subscriptions 503 R stream_disconnected
subscriptions 503 I stream_backpressure
"""
RESERVED = """
no_eligible_execution stream_not_found waitpoint_pending_use_buffer_script resume_condition_not_met
duplicate_signal ok_already_applied stream_already_closed execution_not_eligible_for_attempt
invalid_offset quota_attach_conflict budget_override_not_allowed
"""
# Codes of our own, which docs/reference/errors.md marks.
ADDED = """
validation 400 T waitpoint_limit_exceeded signal_bytes_exceeded
validation 400 T batch_too_large tag_limit_exceeded lane_limit_exceeded
contention 409 R execution_being_deleted lane_placement_changed
limit 429 R signature_limit_exceeded
"""
CLASS_BY_GROUP = {
    "not_found": "NotFoundError",
    "validation": "ValidationError",
    "auth": "AuthError",
    "contention": "ContentionError",
    "conflict": "ConflictError",
    "state": "StateError",
    "limit": "LimitError",
    "bug": "BugError",
    "corruption": "CorruptionError",
    "key_store": "KeyStoreError",
    "availability": "UnavailableError",
    "subscriptions": "UnavailableError",
}


def rows_of(text: str) -> dict[str, tuple[str, int, str]]:
    rows: dict[str, tuple[str, int, str]] = {}
    for line in text.strip().splitlines():
        group, status, letter, *codes = line.split()
        for code in codes:
            assert code not in rows
            rows[code] = (group, int(status), letter)
    return rows


def test_the_catalogue_holds_the_specified_codes_and_ours() -> None:
    reserved = set(RESERVED.split())
    assert set(CATALOGUE) - OURS == rows_of(SPECIFIED).keys() | reserved
    assert rows_of(ADDED).keys() == OURS


def test_the_reference_marks_our_own_codes() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/errors.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \* \|", page, re.MULTILINE)) == OURS


@pytest.mark.parametrize(("code", "row"), rows_of(SPECIFIED + ADDED.lstrip()).items())
def test_class_group_and_status_of_each_code(code: str, row: tuple[str, int, str]) -> None:
    entry = CATALOGUE[code]
    assert (entry.group, entry.http_status, entry.error_class) == row


@pytest.mark.parametrize("code", CATALOGUE)
def test_every_code_becomes_a_typed_helpful_picklable_error(code: str) -> None:
    error = engine_error(code, ["what: why"], "the_op")
    entry = CATALOGUE[code]
    assert isinstance(error, EngineError)
    expected = {"timeout": "TimeoutError_", "transport": "TransportError"}.get(
        code, CLASS_BY_GROUP[entry.group]
    )
    assert isinstance(error, getattr(errors, expected))
    assert (error.code, error.group, error.op) == (code, entry.group, "the_op")
    assert error.http_status == entry.http_status
    assert entry.hint.endswith(".")
    assert 10 < len(entry.hint) < 100
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert vars(twin) == vars(error)
        assert str(twin) == str(error)


def test_the_text_of_an_error_reads_code_detail_hint() -> None:
    error = engine_error("invalid_input", ["lane_id: Empty"], "create")
    assert str(error) == (
        "invalid_input: lane_id: Empty (it must not be empty). Correct the named field and call "
        "again."
    )
    assert str(engine_error("stale_lease")).startswith("stale_lease: Stop work")
    assert error.details == ("lane_id: Empty",)
    assert error.detail == "lane_id: Empty"


def test_only_the_retryable_class_is_retryable() -> None:
    for code, entry in CATALOGUE.items():
        if code != "transport":
            error = engine_error(code)
            assert error.retryable is (entry.error_class is ErrorClass.RETRYABLE), code


def test_an_unknown_code_is_terminal_and_names_function_execution_and_code() -> None:
    error = engine_error("brand_new", ["a", "b"], "claim", function="ff_claim", execution_id="e1")
    assert isinstance(error, UnknownCodeError)
    assert isinstance(error, ReplyError)
    assert (error.kind, error.unknown_code) == ("protocol", "brand_new")
    assert (error.error_class, error.http_status) == (ErrorClass.TERMINAL, 500)
    assert (error.function, error.execution_id, error.ambiguous) == ("ff_claim", "e1", False)
    assert "ff_claim answered the unknown code 'brand_new' (a, b) for e1" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.function) == (str(error), "ff_claim")


def test_an_unreadable_reply_may_have_taken_effect() -> None:
    error = ReplyError("ff_fail", "7", "e1", op="fail")
    assert (error.error_class, error.ambiguous) == (ErrorClass.TERMINAL, True)
    assert (error.function, error.execution_id, error.op) == ("ff_fail", "e1", "fail")
    assert "ff_fail answered 7 for e1" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.execution_id) == (str(error), "e1")


def test_a_code_outside_the_catalogue_built_by_hand_still_answers() -> None:
    error = EngineError("made_up")
    assert (error.error_class, error.group, error.http_status) == (ErrorClass.BUG, "bug", 500)


def test_statuses_that_depend_on_more_than_the_code() -> None:
    assert NotFoundError("waitpoint_not_found", op="deliver_signal").http_status == 409
    assert NotFoundError("execution_not_found", op="deliver_signal").http_status == 404
    assert CorruptionError("corruption", "handle_codec: bad magic").http_status == 400
    assert CorruptionError("corruption", "execution: state: bad").http_status == 500
    assert ValidationError("invalid_input", undecodable=True).http_status == 422
    assert invalid_input("a", "b", undecodable=True).http_status == 422
    assert invalid_input("a", "b").http_status == 400


def test_a_pool_closed_by_shutdown_may_be_retried() -> None:
    assert not UnavailableError("unavailable", "read").retryable
    closed = UnavailableError("unavailable", "read", shutting_down=True)
    assert closed.retryable
    assert closed.error_class is ErrorClass.TERMINAL
    assert "shutting down" in closed.hint
    assert pickle.loads(pickle.dumps(closed)).retryable


def test_budget_exceeded_is_cooperative() -> None:
    error = engine_error("budget_exceeded", ["tokens"], "usage")
    assert isinstance(error, BudgetExceeded)
    assert isinstance(error, StateError)
    assert error.error_class is ErrorClass.COOPERATIVE
    assert error.details == ("tokens",)


def test_timeouts_do_not_collide_with_the_builtin() -> None:
    error = engine_error("timeout", ["claim", "30s"])
    assert isinstance(error, TimeoutError_)
    assert not isinstance(error, TimeoutError)
    assert error.http_status == 504


@pytest.mark.parametrize(
    ("kind", "repeat"),
    [
        ("transport", True),
        ("timeout", True),
        ("cluster", True),
        ("busy_loading", True),
        ("out_of_memory", True),
        ("read_only", True),
        ("busy_script", True),
        ("cannot_persist", True),
        ("no_replicas", True),
        ("protocol", False),
        ("auth", False),
        ("script_not_loaded", False),
        ("other", False),
    ],
)
def test_transport_faults_by_kind(kind: str, *, repeat: bool) -> None:
    plain = TransportError(kind, "boom", op="claim")
    assert plain.retryable is repeat
    assert plain.safe_to_repeat is repeat
    assert plain.error_class == ("R" if repeat else "T")
    assert (plain.code, plain.http_status, plain.op) == ("transport", 500, "claim")
    said = "" if kind == "transport" else f"{kind}: "
    assert str(plain).startswith(f"transport: {said}boom. ")
    lost = TransportError(kind, "boom", ambiguous=True)
    assert not lost.safe_to_repeat
    assert lost.retryable is repeat
    assert "may have taken effect" in str(lost)
    twin = pickle.loads(pickle.dumps(lost))
    assert (twin.kind, twin.ambiguous, str(twin)) == (kind, True, str(lost))


def test_the_transport_kinds_are_closed() -> None:
    assert len(FAULT_KINDS) == 13
    with pytest.raises(ValueError, match="unknown transport fault kind 'gremlins'"):
        TransportError("gremlins", "")


def test_a_transport_code_from_the_wire_keeps_its_kind() -> None:
    error = engine_error("transport", ["cluster", "slot moved"])
    assert isinstance(error, TransportError)
    assert (error.kind, error.message) == ("cluster", "slot moved")
    other = engine_error("transport", ["gremlins", "x"])
    assert isinstance(other, TransportError)
    assert other.kind == "other"


def test_config_errors_name_context_and_field() -> None:
    assert str(ConfigError("worker", "no lanes")) == "config: worker: no lanes"
    error = ConfigError("worker", "must be positive", "lease_ttl_ms")
    assert str(error) == "config: worker.lease_ttl_ms: must be positive"


LOCAL = [
    ConfigError("worker", "no lanes", field="lanes"),
    WorkerAtCapacity(),
    TaskFinishedError("{fp:1}:x", "complete"),
    LeaseLost("lease_revoked"),
    LeaseLost("renewal_deadline", "no renewal for 30 s", "{fp:1}:x"),
    PossiblySucceeded("complete", "{fp:1}:x", "connection lost"),
    RetryableError("try later"),
    PermanentError("never"),
    IdParseError("execution_id", "MissingTag", "x"),
]


@pytest.mark.parametrize("error", LOCAL, ids=lambda error: type(error).__name__)
def test_local_errors_pickle_and_copy(error: FlowFabricError) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert vars(twin) == vars(error)
        assert str(twin) == str(error) != ""
        assert twin.retryable is error.retryable


def test_local_errors_say_what_happened() -> None:
    assert str(LOCAL[2]) == ("task {fp:1}:x was already ended by complete; end a task only once")
    assert str(LOCAL[3]).startswith("lease lost (lease_revoked): Stop work")
    assert str(LOCAL[4]) == "lease of {fp:1}:x lost (renewal_deadline): no renewal for 30 s"
    assert str(LOCAL[5]) == (
        "complete of {fp:1}:x: no reply (connection lost); read the state before repeating the call"
    )
    assert WorkerAtCapacity().code == "worker_at_capacity"
    assert (WorkerAtCapacity().retryable, LOCAL[0].retryable) == (True, False)
    assert (RetryableError.category, PermanentError.category) == ("transient", "permanent")
    assert (RetryableError().retryable, PermanentError().retryable) == (True, False)


def test_people_see_compact_ids_and_programs_canonical_ones() -> None:
    uuid = "11111111-2222-4333-8444-555555555555"
    canonical, compact = f"{{fp:42}}:{uuid}", f"42-{uuid}"
    conflict = EngineError("idempotency_conflict", "k", canonical)
    shown = [
        conflict,
        EngineError("corruption", f"{canonical}: record: is missing"),
        TaskFinishedError(canonical, "complete"),
        LeaseLost("lease_revoked", "", canonical),
        PossiblySucceeded("complete", canonical),
        ReplyError("ff_fail", "nothing", canonical),
    ]
    for error in shown:
        assert compact in str(error)
        assert canonical not in str(error)
    assert conflict.details == ("k", canonical)
    # The name of a key is for the server's own tools.
    key = f"ff:exec:{{fp:42}}:{canonical}:core"
    assert key in str(EngineError("corruption", f"{key}: has the wrong type"))


def test_every_exception_of_the_module_is_an_error_of_the_product() -> None:
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, FlowFabricError), name


@pytest.mark.parametrize(
    ("detail", "shown"),
    [
        ("lane: TooLong(65)", "lane: TooLong(65) (the limit is 64 bytes)"),
        ("execution_id: InvalidUuid: 'x'", "execution_id: InvalidUuid: 'x' (a UUID has 32 lower"),
        ("required:not_array", "required:not_array (it must be a list)"),
        ("cursor: Empty: give start, end", "cursor: Empty: give start, end."),
        ("priority: must be a number", "priority: must be a number."),
        ("Empty", "Empty."),
    ],
)
def test_detail_words_are_explained_to_people_only(detail: str, shown: str) -> None:
    error = ValidationError("invalid_input", detail)
    assert str(error).startswith(f"invalid_input: {shown}")
    assert (error.detail, error.details) == (detail, (detail,))
