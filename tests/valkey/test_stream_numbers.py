"""Numbered appends: a repeat writes nothing, from any writer."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.errors import TransportError
from tests.support.engine import Engine
from tests.support.server import TestServer
from tests.support.storage import lossy
from tests.support.streams import frames, payloads


@pytest.mark.parametrize("mode", ["durable", "summary", "best_effort"])
async def test_a_lost_reply_is_repeated_once(engine: Engine, valkey: TestServer, mode: str) -> None:
    handle = await engine.running()
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_append")
        how: dict[str, Any] = {"mode": mode, "seq": 1}
        outcome = await client.streams.append_frame(handle, frames(b'{"a":1}')[0], **how)
        assert proxy.dropped == 1
    assert (outcome.duplicate, outcome.frame_count) == (True, 1)
    assert outcome.summary_version == (1 if mode == "summary" else None)
    page = await engine.backend.streams.read_stream(handle.execution_id, 0)
    assert [frame.id for frame in page.frames] == [outcome.stream_id]


async def test_a_lost_reply_without_a_number_is_ambiguous(
    engine: Engine, valkey: TestServer
) -> None:
    handle = await engine.running()
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_append")
        with pytest.raises(TransportError) as caught:
            await client.streams.append_frame(handle, frames("x")[0])
    assert caught.value.ambiguous
    assert await payloads(engine, handle) == [b"x"]
