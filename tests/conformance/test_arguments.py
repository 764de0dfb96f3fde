"""Arguments of the wrong type or form: `invalid_input` naming the field, nothing written.

The second half is mechanical: every parameter of every public operation, and every field of what
is passed as one, gets values of types that it does not take.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from flowfabric.core.conditions import AllOf, Count, Single
from flowfabric.core.contracts.executions import Completed, Created, NewExecution
from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.errors import EngineError, ValidationError
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.events import EventFilter
from flowfabric.engine.api.executions import Completion, EndOutcome
from tests.conformance.argument_calls import CALLS, SCANNERS, methods, operation
from tests.support.engine import TTL, Engine, unchanged
from tests.support.leases import OTHER, WORKER, grant, lapsed, reclaim_grant

SURROGATE = "\ud800"
OVERRIDE = "operator_override"
Call = Callable[[Backend, Any], Awaitable[Any]]


def fail(**wrong: Any) -> Call:
    given: dict[str, Any] = {"failure_reason": "x", "failure_category": "transient"} | wrong
    return lambda b, h: b.executions.fail_execution(h.execution_id, given.pop("fence", h), **given)


def fenced(fence: Any) -> Call:
    return lambda b, h: b.executions.complete_execution(h.execution_id, fence)


def complete(**wrong: Any) -> Call:
    return lambda b, h: b.executions.complete_execution(h.execution_id, h, **wrong)


def cancel(*reason: Any, **wrong: Any) -> Call:
    return lambda b, h: b.executions.cancel_execution(h.execution_id, *reason, **wrong)


def replay(**wrong: Any) -> Call:
    return lambda b, h: b.executions.replay_execution(h.execution_id, **wrong)


def revoke(**wrong: Any) -> Call:
    return lambda b, h: b.leases.revoke_lease(h.execution_id, **wrong)


RUNNING: list[tuple[str, Call]] = [
    ("failure_reason", fail(failure_reason=None)),
    ("failure_reason", fail(failure_reason=b"x")),
    ("failure_category", fail(failure_category=5)),
    ("source", fail(source=5)),
    ("source", fail(source=None)),
    ("source", fail(source="a b")),
    ("source", fail(source=SURROGATE)),
    ("retry_policy_json", fail(fence=Fence(), source=OVERRIDE, retry_policy_json=5)),
    ("retry_policy_json", fail(fence=Fence(), source=OVERRIDE, retry_policy_json=SURROGATE)),
    ("source", complete(source=5)),
    ("source", complete(source=None)),
    ("result_payload", complete(result_payload="text")),
    ("result_payload", complete(result_payload=5)),
    ("result_payload", complete(result_payload=bytearray(b"x"))),
    ("result_encoding", complete(result_payload=b"", result_encoding=7)),
    ("result_encoding", complete(result_payload=b"", result_encoding=None)),
    ("result_encoding", complete(result_payload=b"", result_encoding=SURROGATE)),
    ("fence", fenced(None)),
    ("fence", fenced("a/1/b/0")),
    ("lease_id", fenced(Fence("a/b", 1, "c", 0))),
    ("lease_id", fenced(Fence(None, 1, "c"))),  # pyright: ignore[reportArgumentType]
    ("lease_id", fenced(Fence(SURROGATE, 1, "c"))),
    ("attempt_id", fenced(Fence("a", 1, "b/c", 0))),
    ("attempt_id", fenced(Fence("a", 1, 5))),  # pyright: ignore[reportArgumentType]
    ("lease_epoch", fenced(Fence("a", "1", "c"))),  # pyright: ignore[reportArgumentType]
    ("lease_epoch", fenced(Fence("a", -1, "c"))),
    ("lease_epoch", fenced(Fence("a", True, "c"))),
    ("attempt_index", fenced(Fence("a", 1, "c", 1.5))),  # pyright: ignore[reportArgumentType]
    ("reason", cancel(None)),
    ("reason", cancel(5)),
    ("source", cancel(source=5)),
    ("source", cancel(source=None)),
    ("source", cancel(source=SURROGATE)),
    ("fence", cancel(source="worker", fence=None)),
    (
        "source",
        lambda b, h: b.executions.delay_execution(h.execution_id, h, delay_until=1, source=None),  # pyright: ignore[reportArgumentType]
    ),
    ("source", lambda b, h: b.executions.move_to_waiting_children(h.execution_id, h, source=5)),  # pyright: ignore[reportArgumentType]
    ("progress_message", lambda b, h: b.executions.progress(h, 5, 5)),  # pyright: ignore[reportArgumentType]
    ("fence", lambda b, h: b.executions.update_progress(h.execution_id, None)),  # pyright: ignore[reportArgumentType]
    ("fence", lambda b, h: b.leases.renew_lease(h.execution_id, None, TTL)),  # pyright: ignore[reportArgumentType]
    ("expected_lease_id", revoke(expected_lease_id=None)),
    ("expected_lease_id", revoke(expected_lease_id=SURROGATE)),
    ("reason", revoke(reason=None)),
    ("revoked_by", revoke(revoked_by=None)),
    ("reason", replay(reason=None)),
    ("requested_by", replay(requested_by=5)),
    ("expected_replay_count", replay(expected_replay_count="abc")),
    ("expected_replay_count", replay(expected_replay_count=-1)),
    ("expected_replay_count", replay(expected_replay_count=True)),
]


async def refuse(engine: Engine, call: Callable[[], Awaitable[Any]], field: str) -> None:
    error = await unchanged(engine, call)
    assert isinstance(error, ValidationError), error
    assert (error.code, error.detail.partition(":")[0]) == ("invalid_input", field), error


@pytest.mark.parametrize(("field", "call"), RUNNING)
async def test_a_running_execution(engine: Engine, field: str, call: Call) -> None:
    handle = await engine.running()
    await refuse(engine, lambda: call(engine.backend, handle), field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capability_hash", None),
        ("capability_hash", SURROGATE),
        ("route_snapshot_json", 5),
        ("admission_summary", b"x"),
        ("lane_id", None),
        ("worker_id", None),
        ("worker_instance_id", "a b"),
        ("grant_ttl_ms", None),
    ],
)
@pytest.mark.parametrize("kind", ["claim", "reclaim"])
async def test_grants(engine: Engine, kind: str, field: str, value: Any) -> None:
    if kind == "claim":
        eid, ask = await engine.create(), engine.backend.claims.issue_claim_grant
    else:
        eid, ask = (await lapsed(engine)).execution_id, engine.backend.claims.issue_reclaim_grant
    await refuse(engine, lambda: ask(eid, **(OTHER | {field: value})), field)


@pytest.mark.parametrize(
    ("field", "changes"),
    [("grant", None), ("grant_key", {"grant_key": None}), ("expires_at_ms", {"expires_at_ms": ""})],
)
async def test_a_reclaim(engine: Engine, field: str, changes: dict[str, Any] | None) -> None:
    held: Any = await reclaim_grant(engine, (await lapsed(engine)).execution_id)
    given: Any = None if changes is None else msgspec.structs.replace(held, **changes)
    await refuse(
        engine,
        lambda: engine.backend.claims.reclaim_execution(given, **OTHER, lease_ttl_ms=TTL),
        field,
    )


@pytest.mark.parametrize(("field", "value"), [("lane_id", None), ("lane_id", SURROGATE)])
async def test_a_claim(engine: Engine, field: str, value: Any) -> None:
    held = await grant(engine, await engine.create())
    given: dict[str, Any] = WORKER | {"lease_ttl_ms": TTL, field: value}
    await refuse(engine, lambda: engine.backend.claims.claim_execution(held, **given), field)
    fused: dict[str, Any] = {"lease_duration_ms": TTL, field: value}
    eid = await engine.create()
    await refuse(engine, lambda: engine.backend.claims.issue_grant_and_claim(eid, **fused), field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("payload_encoding", 7),
        ("payload_encoding", None),
        ("payload_encoding", SURROGATE),
        ("input_payload", "txt"),
        ("input_payload", None),
        ("delay_until", "soon"),
        ("execution_deadline_at", 2**63),
        ("priority", "high"),
        ("policy", "{}"),
        ("idempotency_digest", "text"),
        ("idempotency_digest", bytes(33)),
    ],
)
async def test_only_that_item_of_a_creation_fails(engine: Engine, field: str, value: Any) -> None:
    def new(**fields: Any) -> NewExecution:
        return NewExecution(execution_id=engine.new_id(), execution_kind="job", **fields)

    outcomes = await engine.backend.executions.create_many([new(), new(**{field: value}), new()])
    assert [type(outcome) for outcome in outcomes] == [Created, ValidationError, Created]
    error = outcomes[1]
    assert isinstance(error, ValidationError)
    assert (error.code, error.detail.partition(":")[0]) == ("invalid_input", field)
    assert len(await engine.claim_all()) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("result_encoding", SURROGATE), ("result_encoding", 5), ("result_payload", "text")],
)
async def test_only_that_item_of_a_completion_fails(engine: Engine, field: str, value: Any) -> None:
    def item(handle: Handle, **fields: Any) -> Completion:
        given: dict[str, Any] = {"result_payload": b"r"} | fields
        return Completion(handle, **given)

    for fused in (False, True):
        first, second, third = [await engine.running() for _ in range(3)]
        items = [item(first), item(second, **{field: value}), item(third)]
        outcomes: list[Completed | EndOutcome]
        if fused:
            errors, _ = await engine.backend.claims.complete_and_claim(
                first.execution_id.tag, items, engine.want(), 0
            )
            outcomes = list(errors)
        else:
            outcomes = list(await engine.backend.executions.complete_many(items))
        assert [isinstance(outcome, EngineError) for outcome in outcomes] == [False, True, False]
        error = outcomes[1]
        assert isinstance(error, ValidationError)
        assert (error.code, error.detail.partition(":")[0]) == ("invalid_input", field)
        await engine.backend.executions.complete(second)


async def test_reasons_are_never_refused_for_what_they_say(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.progress(handle, message=f"half {SURROGATE}")
    await engine.backend.executions.cancel_execution(handle.execution_id, f"odd {SURROGATE}")
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert info.cancellation_reason == "odd ?"


async def test_a_fence_of_unknown_ids_is_stale_not_wrong(engine: Engine) -> None:
    handle = await engine.running()
    error = await unchanged(
        engine,
        lambda: engine.backend.executions.complete_execution(
            handle.execution_id, Fence(new_uuid(), 1, new_uuid())
        ),
    )
    assert error.code == "stale_lease"


@pytest.mark.parametrize(
    ("field", "fence"),
    [("fence", None), ("lease_id", Fence("a/b", 1, "c", 0)), ("attempt_id", Fence("a", 1, "b/c"))],
)
async def test_a_suspension_by_triple(engine: Engine, field: str, fence: Any) -> None:
    handle = await engine.running()
    await refuse(
        engine,
        lambda: engine.backend.suspensions.suspend_by_triple(
            handle.execution_id, fence, condition=Single("k")
        ),
        field,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("namespace", 5), ("lane", b"x"), ("kind", SURROGATE), ("flow_id", []), ("outcome", 1.5)),
        *(("execution_id", True), ("types", "expired"), ("types", [5]), ("tags", None)),
    ],
)
async def test_the_filter_of_a_subscription(engine: Engine, field: str, value: Any) -> None:
    where = EventFilter(**{field: value})
    await refuse(engine, lambda: engine.backend.events.subscribe_lease_history(where=where), field)


@pytest.mark.parametrize(
    "condition",
    [
        *(None, "k", Single(5), Single("k", [5]), Single(SURROGATE), AllOf(5), AllOf(("k",))),  # pyright: ignore[reportArgumentType]
        *(Count(n="1", waitpoints=("k",)), Count(n=1, waitpoints="k"), Count(n=1, waitpoints=(5,))),  # pyright: ignore[reportArgumentType]
        Count(n=1, waitpoints=("k",), count_kind="Distinct"),  # pyright: ignore[reportArgumentType]
    ],
)
async def test_the_condition_of_a_suspension(engine: Engine, condition: Any) -> None:
    handle = await engine.running()
    await refuse(
        engine, lambda: engine.backend.suspensions.suspend(handle, condition=condition), "condition"
    )


"""Refusals that are meant to leave a trace: when a wrong token was last shown."""
"""How a refusal names a parameter otherwise than by its name: most have codes of their own."""


async def call(engine: Engine, name: str, given: dict[str, Any]) -> Any:
    """The operation with these arguments, by name; `*` and `**` are given whole."""
    given = dict(given)
    method = operation(engine.backend, name)
    parameters = inspect.signature(method).parameters.values()
    first: list[Any] = []
    if starred := [one.name for one in parameters if one.kind is one.VAR_POSITIONAL]:
        first = [given.pop(one.name) for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        first += given.pop(starred[0])
    for one in parameters:
        if one.kind is one.VAR_KEYWORD:
            given |= given.pop(one.name, {})
    answer = await method(*first, **given)
    if hasattr(answer, "aclose"):
        await answer.aclose()
    return answer


def test_every_operation_is_swept() -> None:
    assert set(CALLS) | SCANNERS == set(methods())
