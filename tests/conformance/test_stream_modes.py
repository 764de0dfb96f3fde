"""Durable, summary and best-effort frames, alone and mixed in one stream."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import BestEffort
from flowfabric.core.errors import EngineError
from tests.support.engine import Engine, refused, unchanged
from tests.support.streams import append, frames, payloads


async def live(engine: Engine, handle: Handle, payload: str = "live", **knobs: Any) -> Any:
    return await append(
        engine, handle, payload, mode="best_effort", best_effort=BestEffort(**knobs)
    )


async def patch(engine: Engine, handle: Handle, text: str | bytes, **how: Any) -> Any:
    return await append(engine, handle, text, mode="summary", **how)


async def document(engine: Engine, handle: Handle) -> bytes:
    summary = await engine.backend.streams.read_summary(handle.execution_id, handle.attempt_index)
    assert summary is not None
    return summary.document_json


async def test_knobs_beyond_the_store_are_refused(engine: Engine) -> None:
    handle = await engine.running()
    for name in ("ttl_ms", "maxlen_floor", "maxlen_ceiling"):
        error = await unchanged(engine, lambda n=name: live(engine, handle, **{n: 2**32}))
        assert error.code == "invalid_input"


# --- summary ------------------------------------------------------------------------------------


async def test_no_summary(engine: Engine) -> None:
    handle = await engine.running()
    await append(engine, handle, b"{}")
    assert await engine.backend.streams.read_summary(handle.execution_id, 0) is None
    assert await engine.backend.streams.read_summary(engine.new_id(), 3) is None


async def test_two_patches(engine: Engine) -> None:
    handle, backend, now = await engine.running(), engine.backend, await engine.now()
    await engine.freeze(now)
    first = await patch(engine, handle, '{"a":1,"b":{"c":"__ff_null__"}}')
    await engine.freeze(now + 10)
    second = await patch(engine, handle, '{"a":null,"b":{"d":2}}')
    assert [first.summary_version, second.summary_version] == [1, 2]
    summary = await backend.streams.read_summary(handle.execution_id, 0)
    assert summary is not None
    assert summary.document_json == b'{"b":{"c":null,"d":2}}'
    assert (summary.version, summary.patch_kind) == (2, "json-merge-patch")
    assert (summary.first_applied_ms, summary.last_updated_ms) == (now, now + 10)
    page = await backend.streams.read_stream(handle.execution_id, 0)
    assert [(f.mode, f.summary_version, f.payload) for f in page.frames] == [
        ("summary", 1, b'{"a":1,"b":{"c":"__ff_null__"}}'),
        ("summary", 2, b'{"a":null,"b":{"d":2}}'),
    ]


async def test_numbers_and_empty_arrays_stay_exact(engine: Engine) -> None:
    handle = await engine.running()
    text = '{"big":18446744073709551615,"small":-9223372036854775808,"f":0.1,"list":[],"o":{}}'
    await patch(engine, handle, text)
    await patch(engine, handle, '{"o":{}}')
    assert await document(engine, handle) == text.encode()


async def test_patches_of_many_tasks_are_all_merged(engine: Engine) -> None:
    handle = await engine.running()
    outcomes = await asyncio.gather(*(patch(engine, handle, f'{{"k{n}":{n}}}') for n in range(50)))
    assert sorted(outcome.summary_version for outcome in outcomes) == list(range(1, 51))
    assert await document(engine, handle) == (
        b"{" + b",".join(b'"k%d":%d' % (n, n) for n in range(50)) + b"}"
    )


async def test_a_batch_of_patches(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    batch = frames('{"a":1}', '{"b":2}', '{"a":null}')
    outcome = await backend.streams.append_frames(handle, batch, mode="summary")
    assert (outcome.summary_version, outcome.frame_count) == (3, 3)
    page = await backend.streams.read_stream(handle.execution_id, 0)
    assert [frame.summary_version for frame in page.frames] == [1, 2, 3]
    assert await document(engine, handle) == b'{"b":2}'
    bad = frames('{"a":1}', "[]")
    error = await unchanged(
        engine, lambda: backend.streams.append_frames(handle, bad, mode="summary")
    )
    assert error.code == "invalid_input"


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("nope", "is not JSON"),
        (b'{"a":"\xff"}', "is not JSON"),
        ("[]", "must be a JSON object"),
        ("1", "must be a JSON object"),
        ('{"a":' * 17 + "{}" + "}" * 17, "patch_depth_exceeded"),
    ],
)
async def test_bad_patches_change_nothing(engine: Engine, text: str | bytes, detail: str) -> None:
    handle = await engine.running()
    await patch(engine, handle, '{"a":1}')
    error = await unchanged(engine, lambda: patch(engine, handle, text))
    assert isinstance(error, EngineError)
    assert (error.code, detail in error.detail) == ("invalid_input", True)
    await patch(engine, handle, '{"a":' * 16 + "{}" + "}" * 16)


async def test_only_one_patch_kind(engine: Engine) -> None:
    handle = await engine.running()
    await patch(engine, handle, "{}", patch_kind="json-merge-patch")
    error = await unchanged(engine, lambda: patch(engine, handle, "nope", patch_kind="json-patch"))
    assert "unsupported patch_kind" in error.detail
    # Other modes have no patch, so there is nothing to refuse.
    await append(engine, handle, b"x", patch_kind="json-patch")


async def test_the_document_is_bounded(engine: Engine) -> None:
    handle = await engine.running()
    for number in range(3):
        await patch(engine, handle, f'{{"k{number}":"{"x" * 65_000}"}}')
    await patch(engine, handle, f'{{"k3":"{"x" * 65_000}"}}')
    error = await unchanged(engine, lambda: patch(engine, handle, f'{{"k4":"{"x" * 9000}"}}'))
    assert error.code == "retention_limit_exceeded"
    await patch(engine, handle, '{"k0":null}')
    await patch(engine, handle, f'{{"k4":"{"x" * 9000}"}}')
    tight: dict[str, Any] = {"summary_max_bytes": 100}
    await refused(patch(engine, handle, '{"k5":1}', **tight), "retention_limit_exceeded")


# --- mixing -------------------------------------------------------------------------------------


async def test_modes_share_one_order(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    await append(engine, handle, b"d1")
    await live(engine, handle, "b1")
    await patch(engine, handle, '{"s":1}')
    await append(engine, handle, b"d2")
    page = await backend.streams.read_stream(handle.execution_id, 0)
    assert [frame.mode for frame in page.frames] == ["durable", "best_effort", "summary", "durable"]
    assert [frame.id for frame in page.frames] == sorted(frame.id for frame in page.frames)
    page = await backend.streams.read_stream(
        handle.execution_id, 0, visibility="exclude_best_effort"
    )
    assert [frame.mode for frame in page.frames] == ["durable", "summary", "durable"]


@pytest.mark.parametrize("mode", ["summary", "best_effort"])
async def test_durable_frames_survive_other_modes(engine: Engine, mode: Any) -> None:
    handle, backend = await engine.running(), engine.backend
    await backend.streams.append_frames(handle, frames(*(b"d%d" % n for n in range(200))))
    for _ in range(6):
        await backend.streams.append_frames(
            handle,
            frames(*(b"{}",) * 100),
            mode=mode,
            best_effort=BestEffort(maxlen_ceiling=64) if mode == "best_effort" else None,
        )
    assert (await payloads(engine, handle))[:200] == [b"d%d" % n for n in range(200)]
