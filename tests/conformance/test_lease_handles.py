"""Handles as bytes: round trip, damage, other backends, the older form (03 §13)."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.executions import Completion
from tests.support.engine import Engine, refused, untouched
from tests.support.leases import running

UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"
OTHER_UUID = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
SAMPLE = Handle(
    execution_id=ExecutionId(f"{{fp:7}}:{UUID}"),
    lease=f"{OTHER_UUID}/12",
    attempt=f"{UUID}/3",
    lease_ttl_ms=30_000,
    lane_id="a:b %",
    worker_instance_id="wörker-1",
)


def _text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(raw)) + raw


def _body(**changed: str | bytes | int) -> bytes:
    values: dict[str, str | bytes | int] = {
        "execution_id": f"{{fp:7}}:{UUID}",
        "attempt_index": 3,
        "attempt_id": UUID,
        "lease_id": OTHER_UUID,
        "lease_epoch": 12,
        "lease_ttl_ms": 30_000,
        "lane_id": "a:b %",
        "worker_instance_id": "wörker-1",
    } | changed
    parts: list[bytes] = []
    for name, value in values.items():
        if isinstance(value, int):
            parts.append(struct.pack("<I" if name == "attempt_index" else "<Q", value))
        else:
            parts.append(_text(value))
    return b"".join(parts)


def refusal(opaque: bytes) -> EngineError:
    with pytest.raises(EngineError) as caught:
        Handle.decode(opaque)
    return caught.value


def test_the_bytes_are_the_documented_ones() -> None:
    assert SAMPLE.opaque == bytes((2, 1, 1)) + _body()


def test_round_trip() -> None:
    assert Handle.decode(SAMPLE.opaque) == SAMPLE
    assert Handle.decode(SAMPLE.opaque, "reclaimed").kind == "reclaimed"
    assert Handle.decode(SAMPLE.opaque).fence.lease_epoch == 12


@given(
    partition=st.integers(0, 65535),
    index=st.integers(0, 2**32 - 1),
    epoch=st.integers(1, 2**64 - 1),
    ttl=st.integers(1, 2**53 - 1),
    lane=st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=64),
    ids=st.lists(st.uuids().map(str), min_size=3, max_size=3),
)
def test_round_trip_of_any_handle(
    partition: int, index: int, epoch: int, ttl: int, lane: str, ids: list[str]
) -> None:
    handle = Handle(
        execution_id=ExecutionId(f"{{fp:{partition}}}:{ids[0]}"),
        lease=f"{ids[1]}/{epoch}",
        attempt=f"{ids[2]}/{index}",
        lease_ttl_ms=ttl,
        lane_id=lane,
        worker_instance_id="w",
    )
    assert Handle.decode(handle.opaque) == handle


def test_every_truncation_is_corruption() -> None:
    whole = SAMPLE.opaque
    for size in range(len(whole)):
        error = refusal(whole[:size])
        assert error.code == "corruption", size
        assert error.detail.startswith("handle_codec:")
        assert error.http_status == 400


def test_trailing_bytes_are_corruption() -> None:
    error = refusal(SAMPLE.opaque + b"\0")
    assert (error.code, "trailing" in error.detail) == ("corruption", True)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_handle_or_a_typed_refusal(noise: bytes) -> None:
    for head in (b"", b"\x01", b"\x02\x01\x01"):
        try:
            Handle.decode(head + noise)
        except EngineError as error:
            assert error.code in {"corruption", "handle_from_other_backend"}  # noqa: PT017


@given(position=st.integers(0, len(SAMPLE.opaque) - 1), value=st.integers(0, 255))
def test_a_damaged_byte_never_gives_an_untyped_error(position: int, value: int) -> None:
    damaged = bytearray(SAMPLE.opaque)
    damaged[position] = value
    try:
        decoded = Handle.decode(bytes(damaged))
    except EngineError as error:
        assert error.code in {"corruption", "handle_from_other_backend"}  # noqa: PT017
    else:
        assert decoded.opaque == bytes(damaged)


@pytest.mark.parametrize(
    "opaque",
    [
        bytes((0, 1, 1)) + _body(),
        bytes((3, 1, 1)) + _body(),
        bytes((2, 2, 1)) + _body(),
        bytes((2, 1, 0)) + _body(),
        bytes((2, 1, 9)) + _body(),
        bytes((2, 1, 1)) + _body(execution_id="{fp:7}:nope"),
        bytes((2, 1, 1)) + _body(execution_id=f"{{b:7}}:{UUID}"),
        bytes((2, 1, 1)) + _body(attempt_id="x"),
        bytes((2, 1, 1)) + _body(lease_id=OTHER_UUID.upper()),
        bytes((2, 1, 1)) + _body(lane_id=""),
        bytes((2, 1, 1)) + _body(lane_id="\x07"),
        bytes((2, 1, 1)) + _body(lane_id=b"\xff\xfe"),
        bytes((2, 1, 1)) + _body(worker_instance_id=b"\xc3"),
        bytes((2, 1, 1)) + b"\xff\xff\xff\xff" + _body(),
    ],
)
def test_unreadable_forms_are_corruption(opaque: bytes) -> None:
    error = refusal(opaque)
    assert isinstance(error, CorruptionError)
    assert error.detail.startswith("handle_codec:")


@pytest.mark.parametrize(("tag", "name"), [(2, "postgres"), (3, "sqlite")])
def test_another_backends_bytes(tag: int, name: str) -> None:
    error = refusal(bytes((2, 1, tag)) + _body())
    assert error.code == "handle_from_other_backend"
    assert error.detail == f"expected=valkey actual={name}"
    assert error.http_status == 400


def test_the_older_form_is_read_and_never_written() -> None:
    assert Handle.decode(b"\x01" + _body()) == SAMPLE
    assert SAMPLE.opaque[0] == 2


def test_a_handle_does_not_show_its_fence() -> None:
    assert OTHER_UUID not in repr(SAMPLE)


async def test_decoded_bytes_are_as_good_as_the_handle(engine: Engine) -> None:
    handle = await engine.running()
    stored = Handle.decode(handle.opaque)
    await engine.backend.leases.renew(stored)
    await engine.backend.executions.complete(stored, b"x")
    await engine.backend.executions.complete(handle, b"y")
    assert await engine.backend.reads.get_execution_result(handle.execution_id) == b"x"


async def test_a_handle_of_another_backend_reaches_no_server(engine: Engine) -> None:
    handle = await running(engine)
    foreign = msgspec.structs.replace(handle, backend="postgres")
    backend = engine.backend
    verbs: list[Callable[[], Awaitable[object]]] = [
        lambda: backend.executions.complete(foreign),
        lambda: backend.executions.fail(foreign, "r", "c"),
        lambda: backend.executions.cancel(foreign),
        lambda: backend.executions.delay(foreign, 1),
        lambda: backend.executions.wait_children(foreign),
        lambda: backend.executions.progress(foreign, 1),
        lambda: backend.leases.renew(foreign),
    ]
    async with untouched(engine):
        for verb in verbs:
            error = await refused(verb(), "handle_from_other_backend")
            assert error.detail == "expected=valkey actual=postgres"
        outcomes: list[object] = [
            *await backend.executions.complete_many([Completion(foreign)]),
            *await backend.leases.renew_many([foreign]),
        ]
        for outcome in outcomes:
            assert isinstance(outcome, EngineError)
            assert outcome.code == "handle_from_other_backend"
