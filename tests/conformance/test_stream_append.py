"""Appending frames: what is stored, who may write, limits, retention."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.errors import EngineError, ErrorClass
from flowfabric.core.ids import new_uuid
from tests.support.engine import TTL, Engine, refused, unchanged
from tests.support.executions import Case, promote
from tests.support.streams import SECRET, append, frames, holder, payloads


async def only_frame(engine: Engine, handle: Handle) -> Any:
    page = await engine.backend.streams.read_stream(handle.execution_id, handle.attempt_index)
    (frame,) = page.frames
    return frame


# --- what is stored -----------------------------------------------------------------------------


async def test_every_field_comes_back(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.streams.append_frame(
        handle,
        Frame(
            payload=bytes(range(256)),
            frame_type="agent_step",
            encoding="application/x-thing",
            source="tool",
            correlation_id="c-1",
            metadata_json='{"k":[1]}',
            ts=1_713_100_800_150,
        ),
    )
    frame = await only_frame(engine, handle)
    assert frame.fields == {
        "correlation_id": "c-1",
        "encoding": "application/x-thing",
        "frame_type": "agent_step",
        "metadata_json": '{"k":[1]}',
        "mode": "durable",
        "payload": bytes(range(256)),
        "source": "tool",
        "ts": 1_713_100_800_150,
    }
    assert list(frame.fields) == sorted(frame.fields)


async def test_defaults(engine: Engine) -> None:
    handle = await engine.running()
    before = await engine.now()
    outcome = await append(engine, handle, b"")
    frame = await only_frame(engine, handle)
    assert frame.id == outcome.stream_id
    assert before <= frame.ts <= await engine.now()
    assert msgspec.structs.replace(frame, ts=0, id="") == msgspec.structs.replace(
        frame,
        id="",
        ts=0,
        frame_type="event",
        payload=b"",
        encoding="utf8",
        source="worker",
        mode="durable",
        correlation_id="",
        metadata_json="",
        summary_version=None,
        ttl_ms=None,
    )
    assert list(frame.fields) == ["encoding", "frame_type", "mode", "payload", "source", "ts"]


@pytest.mark.parametrize(
    ("fields", "stored"),
    [
        ({}, "event"),
        ({"kind": "stdout"}, "stdout"),
        ({"kind": "stderr"}, "stderr"),
        ({"kind": "event"}, "event"),
        ({"kind": "blob"}, "blob"),
        ({"kind": "video"}, "event"),
        ({"kind": "stdout", "frame_type": "delta"}, "delta"),
        ({"frame_type": "ü" * 64}, "ü" * 64),
    ],
)
async def test_kinds(engine: Engine, fields: dict[str, Any], stored: str) -> None:
    handle = await engine.running()
    await engine.backend.streams.append_frame(handle, Frame(payload=b"x", **fields))
    assert (await only_frame(engine, handle)).frame_type == stored


async def test_a_read_of_nothing_is_empty_and_open(engine: Engine) -> None:
    handle = await engine.running()
    for execution_id, index in (
        (handle.execution_id, 0),
        (engine.new_id(), 0),
        (handle.execution_id, 7),
    ):
        page = await unchanged(
            engine, lambda e=execution_id, i=index: engine.backend.streams.read_stream(e, i)
        )
        assert (page.frames, page.is_closed, page.closed_reason, page.truncated) == (
            (),
            False,
            None,
            False,
        )


# --- who may write ------------------------------------------------------------------------------


STATES = {
    "waiting": "stream_closed",
    "delayed": "stream_closed",
    "lease_expired": "stale_owner_cannot_append",
    "revoked": "stale_owner_cannot_append",
    "retry_delayed": "stream_closed",
    "retry_waiting": "stream_closed",
    "paused_delayed": "stream_closed",
    "paused_waiting": "stream_closed",
    "waiting_children": "stream_closed",
    "completed": "stream_closed",
    "failed": "stream_closed",
    "cancelled": "stream_closed",
    "expired": "stream_closed",
    "replayed": "stream_closed",
}


async def stranger(engine: Engine) -> Handle:
    """A handle for an execution nobody holds."""
    handle = await engine.running(lane="other")
    return holder(handle, lease_id=new_uuid())


@pytest.mark.parametrize("mode", ["durable", "best_effort", "summary"])
@pytest.mark.parametrize("state", sorted(STATES))
async def test_only_an_active_lease_writes(engine: Engine, state: str, mode: str) -> None:
    case = await Case.make(engine, state)
    held = case.handle or msgspec.structs.replace(
        await stranger(engine), execution_id=case.execution_id
    )
    error = await unchanged(engine, lambda: append(engine, held, b"{}", mode=mode))
    assert isinstance(error, EngineError)
    assert error.code == STATES[state]
    assert error.error_class is ErrorClass.TERMINAL


async def test_an_unknown_execution_is_closed(engine: Engine) -> None:
    handle = msgspec.structs.replace(await engine.running(), execution_id=engine.new_id())
    await refused(append(engine, handle, b"x"), "stream_closed")


async def test_a_lapsed_lease_is_refused_and_not_marked(engine: Engine) -> None:
    handle = await engine.running()
    await append(engine, handle, b"in time")
    await engine.advance(TTL)
    error = await unchanged(engine, lambda: append(engine, handle, b"late"))
    assert error.code == "stale_owner_cannot_append"
    assert (await engine.vector(handle.execution_id)).ownership_state == "leased"


@pytest.mark.parametrize(
    "change",
    [{"lease_id": new_uuid()}, {"epoch": 2}, {"index": 1}],
    ids=["lease id", "epoch", "attempt index"],
)
async def test_each_part_of_the_fence_must_match(engine: Engine, change: dict[str, Any]) -> None:
    handle = await engine.running()
    await append(engine, handle, b"mine")
    other = holder(handle, **change)
    error = await unchanged(engine, lambda: append(engine, other, b"not mine"))
    assert error.code == "stale_owner_cannot_append"
    await append(engine, handle, b"mine still")


async def test_the_attempt_id_is_not_compared(engine: Engine) -> None:
    handle = await engine.running()
    await append(engine, holder(handle, attempt_id=new_uuid()), b"x")
    assert await payloads(engine, handle) == [b"x"]


async def test_a_handle_of_another_backend_proves_nothing(engine: Engine) -> None:
    handle = msgspec.structs.replace(await engine.running(), backend="sqlite")
    await refused(append(engine, handle, b"x"), "handle_from_other_backend")


async def test_the_order_of_the_checks(engine: Engine) -> None:
    """Size, phase, ownership, expiry, index, lease, patch: the first that fails is told."""
    backend, handle = engine.backend, await engine.running()
    large = Frame(payload=bytes(65_537))
    gone = msgspec.structs.replace(handle, execution_id=engine.new_id())
    await refused(backend.streams.append_frame(gone, large), "retention_limit_exceeded")
    bad = frames(b"[]")[0]
    for kind in ("json-merge-patch", "json-patch"):
        how: dict[str, Any] = {"mode": "summary", "patch_kind": kind}
        await refused(backend.streams.append_frame(gone, bad, **how), "stream_closed")
        stale = holder(handle, epoch=9)
        await refused(backend.streams.append_frame(stale, bad, **how), "stale_owner_cannot_append")
        await refused(backend.streams.append_frame(handle, bad, **how), "invalid_input")
    await engine.advance(TTL)
    await refused(
        backend.streams.append_frame(handle, bad, mode="summary"), "stale_owner_cannot_append"
    )


# --- limits -------------------------------------------------------------------------------------


async def test_payload_limit(engine: Engine) -> None:
    handle = await engine.running()
    await append(engine, handle, bytes(65_536))
    error = await unchanged(engine, lambda: append(engine, handle, bytes(65_537)))
    assert error.code == "retention_limit_exceeded"
    await append(engine, handle, bytes(10), max_payload_bytes=10)
    await refused(
        append(engine, handle, bytes(11), max_payload_bytes=10), "retention_limit_exceeded"
    )
    await append(engine, handle, b"", max_payload_bytes=0)
    with_metadata = Frame(payload=bytes(65_530), metadata_json='"üü"')
    await engine.backend.streams.append_frame(handle, with_metadata)
    with_metadata = Frame(payload=bytes(65_531), metadata_json='"üü"')
    await refused(
        engine.backend.streams.append_frame(handle, with_metadata), "retention_limit_exceeded"
    )


async def test_batch_limits(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    full = frames(*(b"x",) * 256)
    assert (await backend.streams.append_frames(handle, full)).frame_count == 256
    await refused(backend.streams.append_frames(handle, [*full, *frames("y")]), "invalid_input")
    await refused(backend.streams.append_frames(handle, []), "invalid_input")
    mebibyte = frames(*(bytes(65_536),) * 16)
    assert (await backend.streams.append_frames(handle, mebibyte)).frame_count == 272
    more = [*mebibyte, *frames("z")]
    error = await unchanged(engine, lambda: backend.streams.append_frames(handle, more))
    assert error.code == "retention_limit_exceeded"


async def test_a_batch_is_all_or_nothing(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    mixed = [*frames("a"), Frame(payload=bytes(65_537)), *frames("b")]
    error = await unchanged(engine, lambda: backend.streams.append_frames(handle, mixed))
    assert error.code == "retention_limit_exceeded"
    stale = holder(handle, epoch=7)
    error = await unchanged(engine, lambda: backend.streams.append_frames(stale, frames("a", "b")))
    assert error.code == "stale_owner_cannot_append"


ODD_NAMES = ["日志", "naïve", "a\u00a0b", "\u200d", "\ue000", "\u2028", "👩\u200d🚀", "x" * 128]


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_frame_types_may_be_any_text(engine: Engine, name: str) -> None:
    handle = await engine.running()
    await engine.backend.streams.append_frame(handle, Frame(payload=b"", frame_type=name))
    (frame,) = (await engine.backend.streams.read_stream(handle.execution_id, 0)).frames
    assert frame.frame_type == name


CONTROLS = ["a\nb", "\x00", "tab\t", "\x7f", "\x9b", "\ud800"]


@pytest.mark.parametrize("name", ["x" * 129, "ü" * 65, *CONTROLS])
async def test_frame_types_are_short_and_have_no_control_characters(
    engine: Engine, name: str
) -> None:
    handle = await engine.running()
    error = await refused(
        engine.backend.streams.append_frame(handle, Frame(payload=b"", frame_type=name)),
        "invalid_frame_type",
    )
    assert error.error_class is ErrorClass.SOFT


async def test_input_is_checked_before_anything_is_written(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    await backend.streams.append_frame(handle, Frame(payload=b"", correlation_id="ü" * 512))
    bad: list[tuple[Frame, dict[str, Any]]] = [
        (Frame(payload=b"", correlation_id="x" * 1025), {}),
        (Frame(payload=b"", correlation_id="\ud800"), {}),
        (Frame(payload=b"", metadata_json="\ud800"), {}),
        (Frame(payload=b"", encoding="x" * 129), {}),
        (Frame(payload=b"", source="ü" * 65), {}),
        (Frame(payload=b"", ts=-1), {}),
        (Frame(payload=b""), {"mode": "sometimes"}),
        (Frame(payload=b""), {"retention_maxlen": -1}),
        (Frame(payload=b""), {"retention_maxlen": 2**32}),
        (Frame(payload=b""), {"retention_maxlen": 1.5}),
        (Frame(payload=b""), {"max_payload_bytes": -1}),
        (Frame(payload=b""), {"seq": -1}),
        (Frame(payload=b""), {"seq": 2**64}),
        (Frame(payload=b""), {"seq": True}),
    ]
    for frame, how in bad:
        error = await unchanged(
            engine, lambda f=frame, h=how: backend.streams.append_frame(handle, f, **h)
        )
        assert isinstance(error, EngineError), how
        assert error.code == "invalid_input"


async def test_a_batch_larger_than_the_retention(engine: Engine) -> None:
    handle = await engine.running()
    batch = frames(*(str(n) for n in range(100)))
    outcome = await engine.backend.streams.append_frames(handle, batch, retention_maxlen=3)
    assert len(outcome.stream_ids) == 100
    assert await payloads(engine, handle) == [b"97", b"98", b"99"]


async def test_a_policy_beyond_the_store_s_numbers(engine: Engine) -> None:
    handle = await engine.running(policy={"stream_policy": {"retention_maxlen": 2**64 - 1}})
    await append(engine, handle, b"x")
    assert await payloads(engine, handle) == [b"x"]


# --- attempts -----------------------------------------------------------------------------------


async def test_a_retry_writes_a_stream_of_its_own(engine: Engine) -> None:
    case = await Case.make(engine, "active")
    await append(engine, case.held, b"first")
    await engine.backend.executions.fail(case.held, "boom", "transient")
    await engine.advance(1000)
    assert await promote(engine, case.execution_id) == "promoted"
    old = case.held
    await case.claim()
    outcome = await append(engine, case.held, b"second")
    assert (case.held.attempt_index, outcome.frame_count) == (1, 1)
    assert await payloads(engine, old) == [b"first"]
    assert await payloads(engine, case.held) == [b"second"]
    await refused(append(engine, old, b"zombie"), "stale_owner_cannot_append")
    assert await payloads(engine, case.held) == [b"second"]


async def test_a_resumed_attempt_goes_on_with_its_stream(engine: Engine) -> None:
    backend = engine.backend
    await backend.secrets.seed_at_boot(SECRET)
    handle = await engine.running()
    await append(engine, handle, b"before")
    outcome: Any = await backend.suspensions.suspend(handle, condition=Single("approval", "go"))
    await refused(append(engine, handle, b"asleep"), "stream_closed")
    page = await backend.streams.read_stream(handle.execution_id, 0)
    assert not page.is_closed
    details = outcome.details
    await backend.signals.deliver_signal(
        handle.execution_id, details.waitpoint_id, details.waitpoint_token, "go"
    )
    resumed = (await engine.claim()).handle
    await refused(append(engine, handle, b"old lease"), "stale_owner_cannot_append")
    assert (await append(engine, resumed, b"after")).frame_count == 2
    await backend.executions.delay(resumed, 1)
    again = (await engine.claim()).handle
    assert (await append(engine, again, b"later")).frame_count == 3
    assert await payloads(engine, again) == [b"before", b"after", b"later"]
