"""At most once per id and per key, and batches in which one item never affects another."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.ids import ExecutionId
from tests.conformance.test_exec_idempotency import DAY, new
from tests.support import lua_keys
from tests.support.engine import Engine


async def ttl(engine: Engine, execution_id: ExecutionId, namespace: str, key: str) -> int:
    left: Any = await engine.backend.transport.call(
        "PTTL", lua_keys.idem(execution_id.tag, namespace, key)
    )
    return int(left)


async def test_empty_key_is_no_key(engine: Engine) -> None:
    first = await engine.create(idempotency_key="")
    second = await engine.create(idempotency_key="")
    assert first != second
    assert not any(name.startswith(b"ff:idem:") for name in await engine.dump())


@pytest.mark.parametrize(
    ("policy", "window"),
    [(None, DAY), ({"max_replay_count": 1}, DAY), ({"dedup_window_ms": 5000}, 5000)],
)
async def test_window(engine: Engine, policy: dict[str, Any] | None, window: int) -> None:
    execution_id = await engine.create(idempotency_key="k", policy=policy)
    assert 0 < await ttl(engine, execution_id, "default", "k") <= window
    assert await ttl(engine, execution_id, "default", "k") > window - 5000


async def test_a_repeat_does_not_extend_the_window(engine: Engine) -> None:
    execution_id = await engine.create(idempotency_key="k")
    key = lua_keys.idem(execution_id.tag, "default", "k")
    await engine.backend.transport.call("PEXPIRE", key, 3000)
    await engine.backend.executions.create_execution(new(engine, idempotency_key="k"))
    assert await ttl(engine, execution_id, "default", "k") <= 3000
