"""The execution policy: validation and normal form."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.errors import ValidationError
from flowfabric.core.policy import (
    DurabilityMode,
    ExecutionPolicy,
    ExponentialBackoff,
    FallbackPolicy,
    FallbackTier,
    FixedBackoff,
    RetryPolicy,
    RoutingRequirements,
    StreamPolicy,
    SuspensionPolicy,
    TimeoutBehavior,
    TimeoutPolicy,
    clamp_priority,
    parse_policy,
)

UUID = "11111111-2222-4333-8444-555555555555"
U32 = 2**32 - 1
U64 = 2**64 - 1

FULL: dict[str, Any] = {
    "priority": 7,
    "delay_until": 1_700_000_000_000,
    "retry_policy": {
        "max_retries": 5,
        "backoff": {"type": "fixed", "delay_ms": 250},
        "retryable_categories": ["transient", "timeout"],
        "retry_on_timeout": True,
    },
    "timeout_policy": {
        "attempt_timeout_ms": 1000,
        "execution_deadline_ms": 2000,
        "max_reclaim_count": 3,
    },
    "max_reclaim_count": 4,
    "suspension_policy": {"default_timeout_ms": 5, "timeout_behavior": "escalate"},
    "fallback_policy": {
        "tiers": [
            {"provider": "a", "model": "m", "timeout_ms": 9},
            {"provider": "b", "model": "n"},
        ]
    },
    "max_replay_count": 2,
    "budget_ids": [UUID],
    "quota_policy_id": UUID,
    "routing_requirements": {
        "required_capabilities": ["cuda", "gpu"],
        "preferred_locality": "eu",
        "isolation_level": "vm",
    },
    "dedup_window_ms": 0,
    "stream_policy": {
        "durability_mode": "durable",
        "retention_maxlen": 10,
        "retention_ttl_ms": 60_000,
    },
    "max_signals_per_execution": 0,
}


def refused(source: Any, code: str = "invalid_policy_json") -> ValidationError:
    with pytest.raises(ValidationError) as error:
        parse_policy(source)
    assert error.value.code == code
    return error.value


def parsed(source: Any) -> ExecutionPolicy:
    policy = parse_policy(source)
    assert policy is not None
    return policy


@pytest.mark.parametrize("source", [None, "", b"", "{}", b" { } ", {}, {"priority": None}])
def test_no_policy(source: Any) -> None:
    assert parse_policy(source) is None


@pytest.mark.parametrize(
    "source",
    [
        "{",
        b"\xff",
        " ",
        "{'a':1}",
        '{"priority":NaN}',
        '{"priority":Infinity}',
        '{"priority":1e999}',
        '{"priority":"\ud800"}',
        "[" * 100_000,
    ],
)
def test_malformed_json_never_degrades_to_no_policy(source: Any) -> None:
    error = refused(source)
    assert (error.detail, error.http_status) == ("malformed", 422)


@pytest.mark.parametrize("source", ["null", "[]", "1", '"x"', b"true", [1]])
def test_the_top_level_must_be_an_object(source: Any) -> None:
    error = refused(source)
    assert (error.detail, error.http_status) == ("not_object", 422)


@pytest.mark.parametrize("value", [[], "x", 1, True])
def test_routing_requirements_must_be_an_object(value: Any) -> None:
    error = refused({"routing_requirements": value})
    assert (error.detail, error.http_status) == ("routing_requirements:not_object", 422)


def test_a_full_policy_parses_and_is_stored_unchanged() -> None:
    policy = parsed(msgspec.json.encode(FULL))
    assert policy == ExecutionPolicy(
        priority=7,
        delay_until=1_700_000_000_000,
        retry_policy=RetryPolicy(5, FixedBackoff(250), ("transient", "timeout"), True),
        timeout_policy=TimeoutPolicy(1000, 2000, 3),
        max_reclaim_count=4,
        suspension_policy=SuspensionPolicy(5, TimeoutBehavior.ESCALATE),
        fallback_policy=FallbackPolicy((FallbackTier("a", "m", 9), FallbackTier("b", "n"))),
        max_replay_count=2,
        budget_ids=(UUID,),
        quota_policy_id=UUID,
        routing_requirements=RoutingRequirements(("cuda", "gpu"), "eu", "vm"),
        dedup_window_ms=0,
        stream_policy=StreamPolicy(DurabilityMode.DURABLE, 10, 60_000),
        max_signals_per_execution=0,
    )
    assert msgspec.json.decode(policy.to_json()) == FULL
    assert parse_policy(policy.to_json()) == policy == parse_policy(policy)


def test_defaults_are_filled_in_on_read_and_left_out_of_storage() -> None:
    policy = parsed('{"priority":1}')
    assert policy.to_json() == b'{"priority":1,"max_reclaim_count":100}'
    assert policy.retry_policy is None
    assert policy.timeout_policy == TimeoutPolicy(None, None, 100)
    assert policy.suspension_policy == SuspensionPolicy(None, TimeoutBehavior.FAIL)
    assert policy.fallback_policy.tiers == ()
    assert policy.routing_requirements == RoutingRequirements((), None, None)
    assert policy.stream_policy == StreamPolicy(DurabilityMode.BUFFERED, 10_000, None)
    assert (policy.max_replay_count, policy.max_signals_per_execution) == (10, 10_000)
    assert (policy.dedup_window_ms, policy.budget_ids) == (86_400_000, ())
    assert (policy.delay_until, policy.quota_policy_id) == (None, None)


def test_the_reclaim_cap_is_always_written() -> None:
    assert ExecutionPolicy().to_json() == b'{"max_reclaim_count":100}'
    assert parse_policy(ExecutionPolicy()) == ExecutionPolicy()
    assert b'"max_reclaim_count":0' in ExecutionPolicy(max_reclaim_count=0).to_json()


def test_an_empty_retry_policy_still_means_retries() -> None:
    policy = parsed({"retry_policy": {}})
    assert policy.retry_policy == RetryPolicy(3, ExponentialBackoff(1000, 60_000, 2.0, False))
    assert policy.to_json() == b'{"retry_policy":{},"max_reclaim_count":100}'
    assert parsed(policy.to_json()).retry_policy == policy.retry_policy


def test_a_backoff_is_stored_whole() -> None:
    policy = parsed({"retry_policy": {"backoff": {"type": "exponential", "multiplier": 3}}})
    assert policy.to_dict()["retry_policy"] == {
        "backoff": {
            "type": "exponential",
            "initial_delay_ms": 1000,
            "max_delay_ms": 60_000,
            "multiplier": 3.0,
            "jitter": False,
        }
    }


def nulls(value: Any) -> Any:
    """The same shape with every leaf null."""
    if isinstance(value, dict):
        return {key: nulls(member) for key, member in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return None


def test_null_means_absent_at_every_level() -> None:
    shape = nulls(FULL)
    shape["retry_policy"]["backoff"] = None
    policy = parsed(shape)
    assert policy == ExecutionPolicy(retry_policy=RetryPolicy())
    assert b"null" not in policy.to_json()


@pytest.mark.parametrize(
    ("given_priority", "stored"), [(-5, 0), (0, 0), (9000, 9000), (9001, 9000), (2**31 - 1, 9000)]
)
def test_priorities_are_clamped(given_priority: int, stored: int) -> None:
    assert parsed({"priority": given_priority}).priority == stored == clamp_priority(given_priority)


U32_PATHS = [
    "retry_policy.max_retries",
    "timeout_policy.max_reclaim_count",
    "max_reclaim_count",
    "max_replay_count",
    "max_signals_per_execution",
]
U64_PATHS = [
    "timeout_policy.attempt_timeout_ms",
    "timeout_policy.execution_deadline_ms",
    "suspension_policy.default_timeout_ms",
    "dedup_window_ms",
    "stream_policy.retention_maxlen",
    "stream_policy.retention_ttl_ms",
]
TEXT_PATHS = ["routing_requirements.preferred_locality", "routing_requirements.isolation_level"]
OBJECT_PATHS = [
    "retry_policy",
    "timeout_policy",
    "suspension_policy",
    "fallback_policy",
    "stream_policy",
]


def at(path: str, value: Any) -> dict[str, Any]:
    """A policy with one member set, `path` being dotted."""
    head, _, rest = path.partition(".")
    return {head: at(rest, value) if rest else value}


NUMBERS = [
    *((path, 0, U32) for path in U32_PATHS),
    *((path, 0, U64) for path in U64_PATHS),
    ("priority", -(2**31), 2**31 - 1),
    ("delay_until", -(2**63), 2**63 - 1),
]


@pytest.mark.parametrize(("path", "low", "high"), NUMBERS)
def test_whole_numbers_and_their_bounds(path: str, low: int, high: int) -> None:
    for value in (low, high):
        assert parse_policy(at(path, value)) is not None
    for value in (low - 1, high + 1):
        error = refused(
            msgspec.json.encode(at(path, value)) if abs(value) < U64 else at(path, value)
        )
        assert error.detail == f"{path}: must be from {low} to {high}"
        assert error.http_status == 422
    wrong_types: list[object] = ["1", 1.0, True, [], {}, math.nan]
    for value in wrong_types:
        error = refused(at(path, value))
        assert error.detail == f"{path}: must be a whole number"
        assert error.http_status == 422


def test_a_number_beyond_64_bits_in_json_is_out_of_range() -> None:
    error = refused('{"dedup_window_ms":99999999999999999999999}')
    assert error.detail == f"dedup_window_ms: must be from 0 to {U64}"


@pytest.mark.parametrize("path", TEXT_PATHS)
def test_text_members(path: str) -> None:
    assert parse_policy(at(path, "eu")) is not None
    assert refused(at(path, 5)).detail == f"{path}: must be text"
    assert refused(at(path, "\ud800")).detail == f"{path}: is not valid Unicode"


@pytest.mark.parametrize("path", OBJECT_PATHS)
def test_object_members(path: str) -> None:
    wrong_types: list[object] = [[], "x", 1]
    for value in wrong_types:
        error = refused(at(path, value))
        assert (error.detail, error.http_status) == (f"{path}: must be an object", 422)


@pytest.mark.parametrize(
    "path",
    [
        "prioritty",
        "retry_policy.retries",
        "retry_policy.max_retries ",
        "timeout_policy.timeout",
        "suspension_policy.x",
        "fallback_policy.x",
        "routing_requirements.capabilities",
        "stream_policy.maxlen",
    ],
)
@pytest.mark.parametrize("value", [1, None])
def test_unknown_fields_are_refused(path: str, value: Any) -> None:
    error = refused(at(path, value))
    assert error.detail == f"{path}: unknown field"
    assert error.http_status == 400


def test_unknown_fields_in_deeper_places() -> None:
    tier = {"provider": "a", "model": "b", "cost": 1}
    assert refused({"fallback_policy": {"tiers": [tier]}}).detail == (
        "fallback_policy.tiers[0].cost: unknown field"
    )
    backoff = {"type": "fixed", "delay_ms": 1, "jitter": True}
    assert refused(at("retry_policy.backoff", backoff)).detail == (
        "retry_policy.backoff.jitter: unknown field"
    )
    assert refused({1: 2}).detail == "1: unknown field"


@pytest.mark.parametrize(
    ("backoff", "detail", "status"),
    [
        ([], "retry_policy.backoff: must be an object", 422),
        ({}, "retry_policy.backoff.type: missing", 422),
        ({"type": 1}, "retry_policy.backoff.type: must be text", 422),
        ({"type": "linear"}, "retry_policy.backoff.type: must be one of fixed, exponential", 400),
        ({"type": "fixed"}, "retry_policy.backoff.delay_ms: missing", 422),
        (
            {"type": "fixed", "delay_ms": -1},
            f"retry_policy.backoff.delay_ms: must be from 0 to {U64}",
            422,
        ),
        (
            {"type": "exponential", "initial_delay_ms": "1"},
            "retry_policy.backoff.initial_delay_ms: must be a whole number",
            422,
        ),
        (
            {"type": "exponential", "max_delay_ms": 1.5},
            "retry_policy.backoff.max_delay_ms: must be a whole number",
            422,
        ),
        (
            {"type": "exponential", "jitter": 1},
            "retry_policy.backoff.jitter: must be true or false",
            422,
        ),
        (
            {"type": "exponential", "multiplier": "2"},
            "retry_policy.backoff.multiplier: must be a number",
            422,
        ),
        (
            {"type": "exponential", "multiplier": True},
            "retry_policy.backoff.multiplier: must be a number",
            422,
        ),
        *(
            (
                {"type": "exponential", "multiplier": value},
                "retry_policy.backoff.multiplier: must be finite and greater than 0",
                400,
            )
            for value in (0, -1, -0.5, math.nan, math.inf, -math.inf, 10**400)
        ),
    ],
)
def test_refused_backoffs(backoff: Any, detail: str, status: int) -> None:
    error = refused(at("retry_policy.backoff", backoff))
    assert (error.detail, error.http_status) == (detail, status)


@pytest.mark.parametrize(
    ("source", "detail", "status"),
    [
        (
            at("retry_policy.retryable_categories", "transient"),
            "retry_policy.retryable_categories: must be an array",
            422,
        ),
        (
            at("retry_policy.retryable_categories", ["a", 1]),
            "retry_policy.retryable_categories[1]: must be text",
            422,
        ),
        (
            at("retry_policy.retry_on_timeout", "yes"),
            "retry_policy.retry_on_timeout: must be true or false",
            422,
        ),
        (
            at("suspension_policy.timeout_behavior", "explode"),
            (
                "suspension_policy.timeout_behavior: must be one of "
                "fail, cancel, expire, auto_resume, escalate"
            ),
            400,
        ),
        (
            at("suspension_policy.timeout_behavior", 1),
            "suspension_policy.timeout_behavior: must be text",
            422,
        ),
        (
            at("stream_policy.durability_mode", "fast"),
            "stream_policy.durability_mode: must be one of buffered, durable",
            400,
        ),
        (
            {"fallback_policy": {"tiers": {}}},
            "fallback_policy.tiers: must be an array",
            422,
        ),
        (
            {"fallback_policy": {"tiers": ["x"]}},
            "fallback_policy.tiers[0]: must be an object",
            422,
        ),
        (
            {"fallback_policy": {"tiers": [{"model": "m"}]}},
            "fallback_policy.tiers[0].provider: missing",
            422,
        ),
        (
            {"fallback_policy": {"tiers": [{"provider": "p", "model": ""}]}},
            "fallback_policy.tiers[0].model: must not be empty",
            400,
        ),
        ({"budget_ids": UUID}, "budget_ids: must be an array", 422),
        ({"budget_ids": [UUID, "x"]}, "budget_ids[1]: is not a UUID", 422),
        ({"budget_ids": [UUID.upper() + "A"]}, "budget_ids[0]: is not a UUID", 422),
        ({"budget_ids": [5]}, "budget_ids[0]: must be text", 422),
        ({"budget_ids": [UUID] * 17}, "budget_ids: must hold at most 16, got 17", 400),
        ({"quota_policy_id": "x"}, "quota_policy_id: is not a UUID", 422),
    ],
)
def test_other_refusals(source: Any, detail: str, status: int) -> None:
    error = refused(source)
    assert (error.detail, error.http_status) == (detail, status)


def test_budget_ids_keep_their_order_without_duplicates() -> None:
    ids = [f"00000000-0000-4000-8000-{n:012d}" for n in range(15, -1, -1)]
    assert parsed({"budget_ids": ids}).budget_ids == tuple(ids)
    assert parsed({"budget_ids": [ids[3], ids[1], ids[3]]}).budget_ids == (ids[3], ids[1])


@pytest.mark.parametrize(
    ("tokens", "detail"),
    [
        ({"gpu": True}, "required:not_array"),
        ("gpu", "required:not_array"),
        (["gpu", 1], "required:non_string_token"),
        (["a,b"], "required:comma_in_token"),
    ],
)
def test_capability_problems_have_their_own_code(tokens: Any, detail: str) -> None:
    source = at("routing_requirements.required_capabilities", tokens)
    assert refused(source, "invalid_capabilities").detail == detail


def test_capabilities_are_normalised() -> None:
    policy = parsed(at("routing_requirements.required_capabilities", ["gpu", "cuda", "gpu"]))
    assert policy.routing_requirements.required_capabilities == ("cuda", "gpu")


def test_a_typed_policy_is_validated_too() -> None:
    assert refused(ExecutionPolicy(max_replay_count=-1)).detail == (
        f"max_replay_count: must be from 0 to {U32}"
    )
    assert refused(ExecutionPolicy(retry_policy=RetryPolicy(backoff=FixedBackoff(-1)))).detail == (
        f"retry_policy.backoff.delay_ms: must be from 0 to {U64}"
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(sorted(FULL)),
        json_values | st.dictionaries(st.sampled_from(sorted(FULL["retry_policy"])), json_values),
        max_size=4,
    )
)
def test_any_object_is_either_refused_with_a_code_or_stable(source: dict[str, Any]) -> None:
    try:
        policy = parse_policy(source)
    except ValidationError as error:
        code = error.code if error.detail else "no detail"
    else:
        code = "accepted"
        if policy is not None:
            assert parse_policy(policy.to_json()) == policy
    assert code in {"accepted", "invalid_policy_json", "invalid_capabilities"}
