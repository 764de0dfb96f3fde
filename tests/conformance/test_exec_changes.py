"""update_progress, change_priority and tags."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.leases import Fence
from tests.support.engine import TTL, Engine, refused, unchanged


@pytest.mark.parametrize("pct", [-1, 101, 1.5, "5", True])
async def test_progress_range(engine: Engine, pct: Any) -> None:
    handle = await engine.running()
    answer = await unchanged(engine, lambda: engine.backend.executions.progress(handle, pct))
    assert answer.code == "invalid_input"
    assert answer.detail.startswith("progress_pct")


async def test_progress_message_is_cut(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.progress(handle, message="a" + "ü" * 4000)
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert info.progress_message == "a" + "ü" * 2047


async def test_progress_checks_in_order(engine: Engine) -> None:
    async def code(fence: Any, execution_id: Any) -> str:
        answer = await unchanged(
            engine,
            lambda: engine.backend.executions.update_progress(execution_id, fence, progress_pct=1),
        )
        return answer.code

    assert await code(Fence(), engine.new_id()) == "execution_not_found"
    waiting = await engine.create()
    assert await code(Fence(), waiting) == "execution_not_active"
    handle = (await engine.claim()).handle
    own = handle.fence
    for stale in (
        Fence(),
        Fence(own.lease_id),
        Fence(own.lease_id, 2),
        Fence("other", 1, own.attempt_id),
        Fence(own.lease_id, 1, "other"),
        Fence(own.lease_id, 1, own.attempt_id, 7),
    ):
        assert await code(stale, handle.execution_id) == "stale_lease"
    await engine.backend.executions.update_progress(
        handle.execution_id, Fence(own.lease_id, own.lease_epoch), progress_pct=1
    )
    await engine.advance(TTL)
    assert await code(Fence(), handle.execution_id) == "lease_expired"
    await engine.advance(-TTL)
    await engine.backend.leases.revoke_lease(handle.execution_id)
    await engine.advance(TTL)
    assert await code(handle, handle.execution_id) == "lease_revoked"


async def test_priority_checks_in_order(engine: Engine) -> None:
    bad: Any = "7"
    await refused(engine.backend.executions.change_priority(engine.new_id(), bad), "invalid_input")
    await refused(
        engine.backend.executions.change_priority(engine.new_id(), 7), "execution_not_found"
    )
    handle = await engine.running()
    await refused(
        engine.backend.executions.change_priority(handle.execution_id, 7), "execution_not_eligible"
    )


async def test_priority_leaves_a_grant_alone(engine: Engine) -> None:
    execution_id = await engine.create()
    grant = await engine.backend.claims.issue_claim_grant(
        execution_id, worker_id="w", worker_instance_id="w-1"
    )
    await engine.backend.executions.change_priority(execution_id, 7)
    claim = await engine.backend.claims.claim_execution(
        grant, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=1000
    )
    assert claim.execution_id == execution_id


# --- tags ---------------------------------------------------------------------------------------

VALID = ["app.task_id", "app.sub.field", "a.b", "a1_.0", "x._", "x.a.", "x.a..b"]
INVALID = ["App.x", "app", "app.", "app..x", "ap p.x", "app.foo-bar", "app.Foo", "", ".x", "ff.x"]


@pytest.mark.parametrize("key", VALID)
async def test_valid_keys(engine: Engine, key: str) -> None:
    execution_id = await engine.create()
    assert await engine.backend.executions.set_execution_tag(execution_id, key, "värde\x00") == 1
    assert await engine.backend.reads.get_execution_tag(execution_id, key) == "värde\x00"


@pytest.mark.parametrize("key", INVALID)
async def test_invalid_keys_write_nothing(engine: Engine, key: str) -> None:
    execution_id = await engine.create()
    tags = {"app.good": "1", key: "2"}
    answer = await unchanged(
        engine, lambda: engine.backend.executions.set_execution_tags(execution_id, tags)
    )
    assert (answer.code, answer.detail) == ("invalid_tag_key", key)


async def test_an_odd_key_cannot_be_updated(engine: Engine) -> None:
    execution_id = await engine.create(tags={"Odd Key": "kept"})
    await refused(
        engine.backend.executions.set_execution_tag(execution_id, "Odd Key", "x"), "invalid_tag_key"
    )


async def test_tag_errors_in_order(engine: Engine) -> None:
    missing = engine.new_id()
    await refused(engine.backend.executions.set_execution_tags(missing, {}), "invalid_input")
    await refused(
        engine.backend.executions.set_execution_tag(missing, "bad", "x"), "invalid_tag_key"
    )
    await refused(
        engine.backend.executions.set_execution_tag(missing, "a.b", "x" * 4097), "invalid_input"
    )
    many = {f"a.b{i}": "x" for i in range(129)}
    await refused(engine.backend.executions.set_execution_tags(missing, many), "invalid_input")
    answer = await unchanged(
        engine, lambda: engine.backend.executions.set_execution_tag(missing, "a.b", "x")
    )
    assert answer.code == "execution_not_found"
    assert await engine.backend.reads.get_execution_tag(missing, "a.b") is None
    execution_id = await engine.create()
    assert await engine.backend.reads.get_execution_tag(execution_id, "a.b") is None
