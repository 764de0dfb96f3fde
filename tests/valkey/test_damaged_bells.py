"""Damaged doorbells never stop work: they only wake workers (damaged by hand)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.executions import Created, NewExecution
from flowfabric.core.policy import parse_policy
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.valkey import keys
from tests.support import lua_keys
from tests.support.claims import GPU, claim_many, ids
from tests.support.engine import Engine

pytestmark = pytest.mark.corrupts

DAMAGED = [
    lua_keys.BELLS,
    lua_keys.LISTENERS,
    keys.wake("default"),
    keys.wake(keys.bell("default", "gpu")),
]
WORKER: dict[str, Any] = {"capabilities": ["gpu"]}


async def damage(engine: Engine, key: str, command: str) -> None:
    call = engine.backend.transport.call
    await call("DEL", key)
    await call(command, key, *("f", "x")[command != "HSET" :])


@pytest.mark.parametrize("command", ["SET", "HSET", "RPUSH"])
@pytest.mark.parametrize("key", DAMAGED)
async def test_work_comes_and_goes(engine: Engine, key: str, command: str) -> None:
    await damage(engine, key, command)
    plain, first = await engine.create(), await engine.create(policy=GPU)
    batch = [
        NewExecution(execution_id=engine.new_id(), execution_kind="job", policy=parse_policy(GPU))
        for _ in range(3)
    ]
    made = await engine.backend.executions.create_many(batch)
    assert [type(each) for each in made] == [Created] * 3
    (claim,) = (await claim_many(engine, 1)).claims
    assert claim.execution_id == plain
    outcomes, claimed = await engine.backend.claims.complete_and_claim(
        plain.tag, [Completion(claim.handle)], engine.want(**WORKER), 2
    )
    assert outcomes == [None]
    rest = await claim_many(engine, **WORKER)
    expected = {first, *(item.execution_id for item in batch)}
    assert {*ids(claimed.claims), *ids(rest.claims)} == expected


@pytest.mark.parametrize("command", ["SET", "HSET", "RPUSH"])
@pytest.mark.parametrize("key", [*DAMAGED, "ear"])
async def test_a_listener_still_hears(engine: Engine, key: str, command: str) -> None:
    listener = engine.backend.wakeups.listen(["default"])
    listener.hear(engine.want(**WORKER).offer)
    call = engine.backend.transport.call
    try:
        if key == lua_keys.LISTENERS:
            # Who listened before is forgotten until they ask again.
            await damage(engine, key, command)
        assert await listener.wait(0.001) == []
        if key != lua_keys.LISTENERS:
            (listening,) = await call("ZRANGE", lua_keys.LISTENERS, 0, -1)
            key = keys.ear(listening.decode()) if key == "ear" else key
            await damage(engine, key, command)
        # Reading and ringing mend what they need.
        assert await listener.peek() == []
        assert await listener.wait(0.001) == []
        first = await engine.create(policy=GPU)
        assert await listener.wait(5) == [("default", first.tag)]
        second = await engine.create()
        assert await listener.wait(5) == [("default", second.tag)]
    finally:
        await listener.aclose()
