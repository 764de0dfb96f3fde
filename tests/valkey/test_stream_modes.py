"""Durable, summary and best-effort frames, alone and mixed in one stream."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, cast

import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import BestEffort
from tests.conformance.test_stream_modes import document, live, patch
from tests.support.engine import Engine, refused, unchanged
from tests.support.server import TestServer
from tests.support.storage import expiry, length, lossy, meta, stream_key, summary_key
from tests.support.streams import append, frames, payloads


def order(entry: str) -> tuple[int, ...]:
    return tuple(map(int, entry.split("-")))


# --- best effort: expiry ------------------------------------------------------------------------


async def test_expiry_is_set_and_refreshed(engine: Engine) -> None:
    handle = await engine.running()
    await live(engine, handle, ttl_ms=5000)
    assert 9000 < await expiry(engine, handle) <= 10_000
    await live(engine, handle, ttl_ms=30_000)
    assert 59_000 < await expiry(engine, handle) <= 60_000
    page = await engine.backend.streams.read_stream(handle.execution_id, 0)
    assert [(frame.mode, frame.ttl_ms) for frame in page.frames] == [
        ("best_effort", 5000),
        ("best_effort", 30_000),
    ]


async def test_without_a_ttl_nothing_expires(engine: Engine) -> None:
    handle = await engine.running()
    await live(engine, handle, ttl_ms=0)
    assert await expiry(engine, handle) == -1
    await live(engine, handle, ttl_ms=5000)
    await live(engine, handle, ttl_ms=-1)
    assert await expiry(engine, handle) == -1
    page = await engine.backend.streams.read_stream(handle.execution_id, 0)
    assert [frame.ttl_ms for frame in page.frames] == [None, 5000, None]


@pytest.mark.parametrize("mode", ["durable", "summary"])
async def test_a_frame_that_stays_ends_the_expiry_for_good(engine: Engine, mode: Any) -> None:
    handle = await engine.running()
    await live(engine, handle)
    assert await expiry(engine, handle) > 0
    await append(engine, handle, b"{}", mode=mode)
    assert await expiry(engine, handle) == -1
    await live(engine, handle)
    assert await expiry(engine, handle) == -1


@pytest.mark.parametrize("mode", ["durable", "summary"])
async def test_no_expiry_after_a_frame_that_stays(engine: Engine, mode: Any) -> None:
    handle = await engine.running()
    await append(engine, handle, b"{}", mode=mode)
    for _ in range(3):
        await live(engine, handle, ttl_ms=1)
    assert await expiry(engine, handle) == -1
    assert await length(engine, handle) == 4


async def test_an_expired_stream_is_written_again(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    first = await live(engine, handle)
    await backend.transport.call("PEXPIRE", stream_key(handle), 0)
    page = await backend.streams.read_stream(handle.execution_id, 0)
    assert (page.frames, page.is_closed, page.truncated) == ((), False, True)
    tail = await backend.streams.tail_stream(handle.execution_id, 0, after=first.stream_id)
    assert not tail.truncated
    second = await live(engine, handle, "again")
    assert second.frame_count == 2
    assert order(second.stream_id) > order(first.stream_id)
    assert await payloads(engine, handle) == [b"again"]
    assert await expiry(engine, handle) > 0


async def test_an_expired_stream_gives_no_id_twice(engine: Engine) -> None:
    """Also when the server's clock was set back meanwhile."""
    handle, call = await engine.running(), engine.backend.transport.call
    await live(engine, handle)
    await call("DEL", stream_key(handle))
    await call("HSET", stream_key(handle, ":meta"), "last_sequence", "99999999999999-5")
    assert (await live(engine, handle)).stream_id == "99999999999999-6"
    assert await length(engine, handle) == 1
    await call("DEL", stream_key(handle))
    batch = await engine.backend.streams.append_frames(handle, frames("a", "b"))
    assert batch.stream_ids == ("99999999999999-7", "99999999999999-8")


# --- best effort: how much is kept --------------------------------------------------------------


async def kept(engine: Engine, handle: Handle) -> tuple[int, float]:
    stored = await meta(engine, handle)
    return int(stored["maxlen_applied_last"]), float(stored["ema_rate_hz"])


async def test_the_first_append_keeps_the_floor(engine: Engine) -> None:
    handle = await engine.running()
    await live(engine, handle, ttl_ms=10_000)
    assert await kept(engine, handle) == (64, 3.2)


async def test_bursts_raise_and_pauses_lower_the_rate(engine: Engine) -> None:
    handle, now = await engine.running(), await engine.now()
    await engine.freeze(now)
    await live(engine, handle, ttl_ms=10_000)
    rates, sizes = [3.2], [64]
    for _ in range(5):
        await live(engine, handle, ttl_ms=10_000)
        size, rate = await kept(engine, handle)
        assert rate == pytest.approx(0.2 * 1000 + 0.8 * rates[-1])
        assert size == min(16_384, math.ceil(rate * 20))
        rates.append(rate)
        sizes.append(size)
    assert sizes == sorted(sizes)
    assert rates == sorted(rates)
    await engine.freeze(now + 20_000)
    await live(engine, handle, ttl_ms=10_000)
    size, rate = await kept(engine, handle)
    assert rate == pytest.approx(0.2 * 0.05 + 0.8 * rates[-1])
    assert size < sizes[-1]


async def test_floor_and_ceiling_hold(engine: Engine) -> None:
    handle, now = await engine.running(), await engine.now()
    await engine.freeze(now)
    knobs: dict[str, Any] = {
        "ttl_ms": 30_000,
        "maxlen_floor": 10,
        "maxlen_ceiling": 100,
        "ema_alpha": 1.0,
    }
    for _ in range(3):
        await live(engine, handle, **knobs)
    assert (await kept(engine, handle))[0] == 100
    await engine.freeze(now + 25_000)
    await live(engine, handle, **knobs)
    assert (await kept(engine, handle))[0] == 10


@pytest.mark.parametrize(
    ("knobs", "floor", "ceiling"),
    [
        ({"maxlen_floor": 0, "maxlen_ceiling": -5}, 64, 16_384),
        ({"maxlen_floor": 500, "maxlen_ceiling": 100}, 500, 500),
    ],
)
async def test_defaults_of_the_knobs(
    engine: Engine, knobs: dict[str, Any], floor: int, ceiling: int
) -> None:
    handle = await engine.running()
    await engine.freeze(await engine.now())
    await live(engine, handle, ttl_ms=10_000, **knobs)
    assert (await kept(engine, handle))[0] == floor
    for _ in range(30):
        await live(engine, handle, ttl_ms=10_000, **knobs)
    assert (await kept(engine, handle))[0] == min(ceiling, 20_000)


@pytest.mark.parametrize("alpha", [0, -1, 1.5, math.inf, math.nan])
async def test_a_senseless_alpha_is_the_default(engine: Engine, alpha: float) -> None:
    handle = await engine.running()
    await engine.freeze(await engine.now())
    await live(engine, handle, ttl_ms=10_000)
    await live(engine, handle, ttl_ms=10_000, ema_alpha=alpha)
    assert (await kept(engine, handle))[1] == pytest.approx(0.2 * 1000 + 0.8 * 3.2)


async def test_a_batch_counts_every_frame(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    await engine.freeze(await engine.now())
    await backend.streams.append_frames(handle, frames("a", "b", "c"), mode="best_effort")
    expected = 3.2
    for _ in range(2):
        expected = 0.2 * 1000 + 0.8 * expected
    assert (await kept(engine, handle))[1] == pytest.approx(expected)


async def test_best_effort_trims_to_about_what_it_keeps(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    batch = frames(*(b"x",) * 250)
    knobs = BestEffort(maxlen_floor=10, maxlen_ceiling=300)
    for _ in range(8):
        await backend.streams.append_frames(handle, batch, mode="best_effort", best_effort=knobs)
    assert 300 <= await length(engine, handle) <= 400


async def test_another_client_continues_the_document(engine: Engine, valkey: TestServer) -> None:
    handle = await engine.running()
    await patch(engine, handle, '{"a":1}')
    async with lossy(engine, valkey) as (other, _):
        outcome = await other.streams.append_frame(handle, frames('{"b":2}')[0], mode="summary")
        assert outcome.summary_version == 2
    outcome = await patch(engine, handle, '{"c":3}')
    assert outcome.summary_version == 3
    assert await document(engine, handle) == b'{"a":1,"b":2,"c":3}'


def remember(engine: Engine, summaries: int) -> None:
    """Forget every summary, and remember this many from now on."""
    streams = cast("Any", engine.backend.streams)
    streams._summaries = lru_cache(summaries)(streams._summaries.__wrapped__)


async def test_a_forgotten_summary_is_read_again(engine: Engine) -> None:
    handle = await engine.running()
    await patch(engine, handle, '{"a":1}')
    remember(engine, 64)
    assert (await patch(engine, handle, '{"b":2}')).summary_version == 2
    assert await document(engine, handle) == b'{"a":1,"b":2}'


async def test_only_the_latest_summaries_are_remembered(engine: Engine) -> None:
    remember(engine, 2)
    handles = [await engine.running() for _ in range(4)]
    for number in range(1, 4):
        for handle in handles:
            outcome = await patch(engine, handle, f'{{"k{number}":{number}}}')
            assert outcome.summary_version == number
    for handle in handles:
        assert await document(engine, handle) == b'{"k1":1,"k2":2,"k3":3}'


async def test_a_stale_copy_does_not_refuse(engine: Engine, valkey: TestServer) -> None:
    """What this client remembers may be larger than what another made of it since."""
    handle = await engine.running()
    await patch(engine, handle, f'{{"a":"{"x" * 500}"}}', summary_max_bytes=1000)
    async with lossy(engine, valkey) as (other, _):
        await other.streams.append_frame(handle, frames('{"a":null}')[0], mode="summary")
    await patch(engine, handle, f'{{"b":"{"y" * 600}"}}', summary_max_bytes=1000)
    assert await document(engine, handle) == b'{"b":"%s"}' % (b"y" * 600)


@pytest.mark.corrupts
@pytest.mark.parametrize("broken", ["[]", "{", "\xff"])
async def test_an_unreadable_document_is_corruption(engine: Engine, broken: str) -> None:
    handle, call = await engine.running(), engine.backend.transport.call
    await patch(engine, handle, '{"a":1}')
    await call("HSET", summary_key(handle), "document", broken, "version", 9)
    deep = '{"a":' * 17 + "{}" + "}" * 17
    for text in ('{"b":1}', deep):
        error = await unchanged(engine, lambda t=text: patch(engine, handle, t))
        assert error.code == "corruption"
    await refused(patch(engine, handle, "[]"), "invalid_input")
    await call("HDEL", summary_key(handle), "patch_kind")
    await refused(engine.backend.streams.read_summary(handle.execution_id, 0), "corruption")


async def test_a_summary_outlives_its_frames_and_its_attempt(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    await patch(engine, handle, '{"a":1}')
    await backend.executions.complete(handle)
    await backend.transport.call("XTRIM", stream_key(handle), "MAXLEN", 0)
    assert await document(engine, handle) == b'{"a":1}'
    page = await backend.streams.read_stream(handle.execution_id, 0)
    assert (page.frames, page.truncated, page.closed_reason) == ((), True, "attempt_success")


async def test_summary_frames_are_trimmed_to_about_64(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    for _ in range(3):
        await backend.streams.append_frames(handle, frames(*("{}",) * 100), mode="summary")
    assert 64 <= await length(engine, handle) <= 164
    summary = await backend.streams.read_summary(handle.execution_id, 0)
    assert summary is not None
    assert summary.version == 300


async def test_the_latest_durable_limit_counts(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    small = BestEffort(maxlen_floor=10, maxlen_ceiling=10)
    await append(engine, handle, b"kept", retention_maxlen=300)
    await append(engine, handle, b"kept", retention_maxlen=150)
    for _ in range(5):
        await backend.streams.append_frames(
            handle, frames(*(b"x",) * 100), mode="best_effort", best_effort=small
        )
    assert 150 <= await length(engine, handle) <= 250


async def test_summary_frames_alone_protect_nothing(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    await patch(engine, handle, '{"a":1}')
    small = BestEffort(maxlen_floor=10, maxlen_ceiling=10)
    for _ in range(5):
        await backend.streams.append_frames(
            handle, frames(*(b"x",) * 100), mode="best_effort", best_effort=small
        )
    assert await length(engine, handle) <= 110
    assert await document(engine, handle) == b'{"a":1}'
