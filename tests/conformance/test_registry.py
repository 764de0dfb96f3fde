"""The worker registry: registration, heartbeats, death, listing (04 §9, S7)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import Engine, refused, untouched

ELSE: dict[str, Any] = {"worker_id": "other", "worker_instance_id": "w-1", "lanes": ["default"]}
W1: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1", "lanes": ["default"]}


async def test_a_worker_without_lanes_has_none(engine: Engine) -> None:
    await engine.backend.workers.register_worker(worker_id="w", worker_instance_id="w-1", lanes=())
    (entry,) = await engine.backend.workers.list_workers()
    assert entry.lanes == ()


async def test_an_instance_belongs_to_one_worker(engine: Engine) -> None:
    await engine.backend.workers.register_worker(**W1)
    async with untouched(engine):
        error = await refused(engine.backend.workers.register_worker(**ELSE), "invalid_input")
    assert "instance_id reassigned" in error.detail
    # Another namespace is another registry.
    outcome = await engine.backend.workers.register_worker(**ELSE, namespace="tenant")
    assert outcome == "registered"
    assert [entry.worker_id for entry in await engine.backend.workers.list_workers("tenant")] == [
        "other"
    ]


@pytest.mark.parametrize(
    "bad",
    [
        {"worker_id": ""},
        {"worker_id": "a b"},
        {"worker_instance_id": "x" * 257},
        {"worker_instance_id": "a\x7f"},
        {"lanes": ["ok", ""]},
        {"liveness_ttl_ms": 0},
        {"liveness_ttl_ms": -1},
        {"liveness_ttl_ms": 1.5},
        {"liveness_ttl_ms": True},
        {"namespace": "a:b"},
        {"namespace": ""},
    ],
)
async def test_registration_is_validated(engine: Engine, bad: dict[str, Any]) -> None:
    async with untouched(engine):
        await refused(engine.backend.workers.register_worker(**(W1 | bad)), "invalid_input")


@pytest.mark.parametrize("tokens", [["a,b"], [""], [f"t{i}" for i in range(257)], ["x" * 4097]])
async def test_capabilities_are_validated(engine: Engine, tokens: list[str]) -> None:
    async with untouched(engine):
        work = engine.backend.workers.register_worker(**W1, capabilities=tokens)
        error = await refused(work, "invalid_capabilities")
    assert error.detail.startswith("worker:")


@pytest.mark.parametrize("reason", ["a\nb", "\x7f", "é" * 129])
async def test_a_death_reason_is_short_and_printable(engine: Engine, reason: str) -> None:
    await engine.backend.workers.register_worker(**W1)
    async with untouched(engine):
        error = await refused(
            engine.backend.workers.mark_worker_dead("w-1", reason=reason), "invalid_input"
        )
    assert error.detail.startswith("reason:")
    assert await engine.backend.workers.mark_worker_dead("w-1", reason="é" * 128) == "marked"
