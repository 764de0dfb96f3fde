"""create_execution: what is stored, where it waits, and what is refused without a trace."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.executions import Created
from flowfabric.core.policy import parse_policy
from flowfabric.core.state import PublicState
from flowfabric.engine.valkey import keys
from tests.conformance.test_exec_create import new
from tests.support.engine import LANE, Engine, unchanged
from tests.support.storage import indexes, raw, record


async def test_smallest_record(engine: Engine) -> None:
    before = await engine.now()
    execution_id = await engine.create()
    fields = await record(engine, execution_id)
    assert set(fields) == {"execution_kind", "created_at", "state"}
    assert before <= int(fields["created_at"]) <= await engine.now()
    assert await indexes(engine, execution_id) == {
        f"lane:{LANE}:eligible": float(fields["created_at"])
    }
    assert await engine.events(execution_id) == []
    owned = [name for name in await engine.dump() if execution_id.encode() in name]
    assert owned == [keys.core(execution_id.tag, execution_id).encode()]


async def test_everything_given_is_readable(engine: Engine) -> None:
    deadline = await engine.now() + 99_000
    execution_id = await engine.create(
        lane="lane: 100%",
        namespace="tenant",
        execution_kind="kind",
        input_payload=b"\x00\xff\xfe",
        payload_encoding="raw",
        priority=7,
        creator_identity="me",
        tags={"Any Key": "ü"},
        execution_deadline_at=deadline,
        policy={"routing_requirements": {"required_capabilities": ["gpu", "cuda"]}},
    )
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.namespace, info.lane_id, info.execution_kind) == ("tenant", "lane: 100%", "kind")
    assert (info.priority, info.payload_encoding) == (7, "raw")
    assert info.execution_deadline_at == deadline
    assert info.required_capabilities == ("cuda", "gpu")
    context = await engine.backend.reads.read_execution_context(execution_id)
    assert context.input_payload == b"\x00\xff\xfe"
    assert context.tags == {"Any Key": "ü"}
    assert context.payload_encoding == "raw"
    fields = await engine.backend.reads.read_exec_core_fields(
        execution_id, ["creator_identity", "nonsense"]
    )
    assert fields == {"creator_identity": "me", "nonsense": None}
    lane = "lane:lane%3A 100%25"
    assert set(await indexes(engine, execution_id)) == {
        f"{lane}:eligible:tenant cuda,gpu",
        "execution_deadline",
    }
    claim = await engine.claim(lane="lane: 100%", capabilities=["gpu", "cuda", "more"])
    assert (claim.namespace, claim.input_payload) == ("tenant", b"\x00\xff\xfe")
    assert claim.tags == {"Any Key": "ü"}
    assert claim.payload_encoding == "raw"


@pytest.mark.parametrize(
    ("given", "policy", "stored"),
    [
        (None, None, 0),
        (-5, None, 0),
        (10_000, None, 9000),
        (-(10**30), None, 0),
        (10**30, None, 9000),
        (3, {"priority": 9}, 3),
        (None, {"priority": 9}, 9),
        (0, {"priority": 9}, 0),
        (None, {"priority": 2**31 - 1}, 9000),
        (None, {"priority": -1, "max_replay_count": 1}, 0),
    ],
)
async def test_priority(
    engine: Engine, given: int | None, policy: dict[str, Any] | None, stored: int
) -> None:
    execution_id = await engine.create(priority=given, policy=policy)
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.priority == stored
    held = await indexes(engine, execution_id)
    assert held == {f"lane:{LANE}:eligible": int(info.created_at) - stored * 10**12}


@pytest.mark.parametrize("source", ["argument", "policy"])
@pytest.mark.parametrize("offset", [-(10**9), 0, 1])
async def test_delay(engine: Engine, source: str, offset: int) -> None:
    await engine.advance(0)
    due = await engine.now() + offset * 60_000
    outcome = await engine.backend.executions.create_execution(
        new(engine, delay_until=due)
        if source == "argument"
        else new(engine, policy=parse_policy({"delay_until": due}))
    )
    assert isinstance(outcome, Created)
    delayed = offset > 0
    assert outcome.public_state is (PublicState.DELAYED if delayed else PublicState.WAITING)
    info = await engine.backend.reads.read_execution_info(outcome.execution_id)
    assert info.delay_until == (due if delayed else None)
    suffix, score = ("delayed", due) if delayed else ("eligible", int(info.created_at))
    assert await indexes(engine, outcome.execution_id) == {f"lane:{LANE}:{suffix}": score}


@pytest.mark.parametrize("absolute", [None, 1, -5, 10**13])
async def test_deadline(engine: Engine, absolute: int | None) -> None:
    execution_id = await engine.create(
        execution_deadline_at=absolute,
        policy={"timeout_policy": {"execution_deadline_ms": 5000}},
    )
    info = await engine.backend.reads.read_execution_info(execution_id)
    expected = int(info.created_at) + 5000 if absolute is None else absolute
    assert info.execution_deadline_at == expected
    assert (await indexes(engine, execution_id))["execution_deadline"] == expected


async def test_zero_durations_are_off(engine: Engine) -> None:
    execution_id = await engine.create(
        policy={"timeout_policy": {"execution_deadline_ms": 0, "attempt_timeout_ms": 0}}
    )
    await engine.claim()
    assert set(await indexes(engine, execution_id)) == {
        *("lease_expiry", f"lane:{LANE}:active", "worker:w-1:leases")
    }


async def _raw_create(engine: Engine, policy: str) -> Any:
    """What the engine itself says to a policy that no caller checked."""
    import msgspec

    options = msgspec.msgpack.encode({"policy": policy})
    execution_id = engine.new_id()
    reply = await engine.backend.calls.fcall(
        "ff_create", execution_id.tag, ("", execution_id, "job", b"", "", options), op="test"
    )
    return reply[2][0]


@pytest.mark.parametrize(
    ("policy", "code", "detail"),
    [
        ("{", b"invalid_policy_json", b"malformed"),
        ("[1]", b"invalid_policy_json", b"not_object"),
        ('"x"', b"invalid_policy_json", b"not_object"),
        *(
            (f'{{"{field}": {value}}}', b"invalid_policy_json", b"malformed")
            for field, value in (
                ("timeout_policy", "5"),
                ("timeout_policy", '{"attempt_timeout_ms": "x"}'),
                ("timeout_policy", "null"),
                ("stream_policy", "1"),
                ("stream_policy", '{"retention_ttl_ms": []}'),
                ("priority", '"high"'),
                ("delay_until", '"soon"'),
                ("dedup_window_ms", "[]"),
                ("max_reclaim_count", "{}"),
            )
        ),
        ('{"budget_ids": 7}', b"invalid_policy_json", b"budget_ids: must be a list"),
        ('{"budget_ids": ["x"]}', b"invalid_policy_json", b"budget_ids[0]: is not a UUID"),
        (
            f'{{"budget_ids": {[7] * 17}}}',
            b"invalid_policy_json",
            b"budget_ids: must hold at most 16",
        ),
        ('{"quota_policy_id": 7}', b"invalid_policy_json", b"quota_policy_id: is not a UUID"),
        ('{"routing_requirements": 1}', b"invalid_policy_json", b"routing_requirements:not_object"),
        *(
            (
                f'{{"routing_requirements": {{"required_capabilities": {tokens}}}}}',
                b"invalid_capabilities",
                detail,
            )
            for tokens, detail in (
                ('["gpu", null]', b"required:non_string_token"),
                ('"gpu"', b"required:not_array"),
                ('{"x": 1}', b"required:not_array"),
                ('["a,b"]', b"required:comma_in_token"),
                ('["a b"]', b"required:control_or_whitespace"),
                ('["task:x"]', b"required:reserved prefix"),
                ('[""]', b"required:empty_token"),
                (str([f"t{i}" for i in range(257)]).replace("'", '"'), b"required:too_many_tokens"),
                (f'["{"x" * 4097}"]', b"required:too_many_bytes"),
            )
        ),
    ],
)
async def test_the_engine_is_the_last_line(
    engine: Engine, policy: str, code: bytes, detail: bytes
) -> None:
    reply = await unchanged(engine, lambda: _raw_create(engine, policy))
    assert reply == [0, code, detail]


async def test_lane_is_checked_before_the_policy(engine: Engine) -> None:
    await engine.backend.lanes.set_lane_state(LANE, "draining")
    reply = await _raw_create(engine, "{")
    assert reply == [0, b"lane_not_accepting", b"draining"]


async def test_policy_is_stored_as_given(engine: Engine) -> None:
    policy = {"max_replay_count": 2, "retry_policy": {"max_retries": 1}}
    execution_id = await engine.create(policy=policy)
    stored: Any = await engine.backend.transport.call(
        "GET", keys.policy(execution_id.tag, execution_id)
    )
    assert parse_policy(stored) == parse_policy(policy)
    assert await raw(engine, keys.tags(execution_id.tag, execution_id)) == {}


@pytest.mark.parametrize(
    "routing", ['{"preferred_locality": "eu"}', '{"required_capabilities": []}', "{}"]
)
async def test_routing_without_capabilities_is_for_any_worker(engine: Engine, routing: str) -> None:
    assert await _raw_create(engine, f'{{"routing_requirements": {routing}}}') == b"waiting"
    claim = await engine.claim()
    assert "required_capabilities" not in await record(engine, claim.execution_id)
