"""Why work waits: what the live workers of its lane and namespace lack (02 §12, 01 §8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from flowfabric.core.contracts.executions import WhyWaiting
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.workers import WorkerEntry, least_missing
from tests.support.engine import LANE, TTL, Engine, refused
from tests.support.executions import mark

NEEDS: dict[str, Any] = {
    "routing_requirements": {"required_capabilities": ["cuda", "gpu", "ssd"]},
    "max_reclaim_count": 5,
}


async def register(
    engine: Engine,
    instance: str,
    *capabilities: str,
    lane: str = LANE,
    namespace: str = "default",
    namespaces: Sequence[str] = (),
) -> None:
    await engine.backend.workers.register_worker(
        worker_id="w",
        worker_instance_id=instance,
        lanes=[lane],
        capabilities=capabilities,
        namespace=namespace,
        namespaces=namespaces,
    )


async def lacking(engine: Engine, execution_id: ExecutionId) -> tuple[tuple[str, ...], int | None]:
    why: WhyWaiting = await engine.backend.reads.explain_execution(execution_id)
    return why.missing_capabilities, why.live_workers


async def test_the_nearest_worker_decides(engine: Engine) -> None:
    execution_id = await engine.create(policy=NEEDS)
    assert await lacking(engine, execution_id) == (("cuda", "gpu", "ssd"), 0)
    await register(engine, "a", "gpu")
    assert await lacking(engine, execution_id) == (("cuda", "ssd"), 1)
    # Two that cover it only together do not cover it.
    await register(engine, "b", "cuda", "ssd", "other")
    assert await lacking(engine, execution_id) == (("gpu",), 2)
    await register(engine, "c", "cuda", "gpu", "ssd")
    assert await lacking(engine, execution_id) == ((), 3)
    await engine.backend.workers.mark_worker_dead("c")
    assert await lacking(engine, execution_id) == (("gpu",), 2)


async def test_workers_of_other_lanes_and_namespaces_do_not_count(engine: Engine) -> None:
    execution_id = await engine.create(policy=NEEDS, namespace="mine")
    everything = ("cuda", "gpu", "ssd")
    await register(engine, "a", *everything, lane="else", namespace="mine")
    await register(engine, "b", *everything, namespace="theirs")
    assert await lacking(engine, execution_id) == (everything, 0)
    await register(engine, "c", *everything, namespace="mine")
    assert await lacking(engine, execution_id) == ((), 1)


async def test_an_old_mismatch_says_nothing_of_now(engine: Engine) -> None:
    execution_id = await engine.create(policy=NEEDS)
    await refused(
        engine.backend.claims.issue_claim_grant(
            execution_id, worker_id="w", worker_instance_id="w"
        ),
        "capability_mismatch",
    )
    await register(engine, "able", "cuda", "gpu", "ssd")
    assert await lacking(engine, execution_id) == ((), 1)
    await engine.claim(capabilities=["cuda", "gpu", "ssd"])
    # It runs: it waits for no worker, whoever else is there.
    await engine.backend.workers.mark_worker_dead("able")
    assert await lacking(engine, execution_id) == ((), None)


@pytest.mark.parametrize("loss", ["expired", "revoked"])
async def test_a_lost_lease_waits_for_a_worker_again(engine: Engine, loss: str) -> None:
    await engine.create(policy=NEEDS)
    handle = (await engine.claim(capabilities=["cuda", "gpu", "ssd"])).handle
    if loss == "expired":
        await engine.advance(TTL + 1)
        await mark(engine, handle.execution_id)
    else:
        await engine.backend.leases.revoke_lease(handle.execution_id)
    await register(engine, "a", "gpu", "ssd")
    assert await lacking(engine, handle.execution_id) == (("cuda",), 1)


async def test_what_ended_or_needs_nothing_lacks_nothing(engine: Engine) -> None:
    plain = await engine.create()
    assert await lacking(engine, plain) == ((), 0)
    ended = await engine.create(policy=NEEDS)
    await engine.backend.executions.cancel_execution(ended)
    assert await lacking(engine, ended) == ((), None)


async def test_who_could_take_it(engine: Engine) -> None:
    """Workers run executions of their own namespace, or of those they name."""
    execution_id = await engine.create(policy=NEEDS, namespace="mine")
    everything = ("cuda", "gpu", "ssd")
    await register(engine, "b", *everything, "more", namespace="theirs", namespaces=["*"])
    await register(engine, "a", *everything, namespaces=["other", "mine"])
    await register(engine, "e", *everything)
    await register(engine, "c", "cuda", namespace="mine")
    await register(engine, "d", *everything, lane="else")
    fleet = await engine.backend.workers.list_workers(None)
    assert [worker.worker_instance_id for worker in fleet] == ["a", "b", "c", "d", "e"]
    assert [worker.namespace for worker in fleet][:4] == ["default", "theirs", "mine", "default"]
    assert [worker.namespaces for worker in fleet][:3] == [("other", "mine"), ("*",), ()]
    page = await engine.backend.workers.list_workers(None, after="a", limit=2)
    assert page == fleet[1:3]
    why = await engine.backend.reads.explain_execution(execution_id)
    assert why.able_workers == ("a", "b")
    await engine.backend.executions.cancel_execution(execution_id)
    why = await engine.backend.reads.explain_execution(execution_id)
    assert why.able_workers == ()


def test_of_equally_near_workers_the_answer_is_always_the_same() -> None:
    def worker(*capabilities: str) -> WorkerEntry:
        return WorkerEntry(
            worker_id="w",
            worker_instance_id="w-1",
            namespace="default",
            lanes=(LANE,),
            capabilities=capabilities,
            last_heartbeat_ms=0,
            liveness_ttl_ms=1,
            registered_at_ms=0,
        )

    pair = [worker("a"), worker("b")]
    assert least_missing(("b", "a"), pair) == least_missing(("a", "b"), pair[::-1])
    assert least_missing(("b", "a"), pair).missing == ("a",)
