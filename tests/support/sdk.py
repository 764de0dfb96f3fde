"""Shorthands for tests of workers, clients and the runtime."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

from flowfabric.app.fabric import Fabric
from flowfabric.core.contracts.executions import ExecutionInfo, NewExecution
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import parse_policy
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.events.completions import CompletionWatch
from flowfabric.engine.events.subscription import FeedEvents
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.connect import ValkeyLocation
from flowfabric.scheduler.claims import WorkerClaims
from flowfabric.sdk.client import Client
from flowfabric.sdk.config import WorkerConfig
from flowfabric.sdk.loop_thread import Connect
from flowfabric.sdk.runtime import Handler, WorkerRuntime
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from flowfabric.valkey.address import parse_url
from tests.support.engine import Engine


def opener(*urls: str, request_timeout: float = 5.0) -> Connect:
    """Opens backends: the first call gets the first url and so on, the last one serves the rest."""
    rest = list(urls)

    async def connect() -> ValkeyBackend:
        url = rest.pop(0) if len(rest) > 1 else rest[0]
        return await ValkeyBackend.connect(parse_url(url), request_timeout=request_timeout)

    return connect


def watch_of(client: Client) -> CompletionWatch:
    """What waits for executions on behalf of a client."""
    return cast("FeedEvents", client.backend.events)._watch


def claims_of(worker: Worker) -> WorkerClaims[ClaimedTask]:
    """The claims of a worker that is connected to the store."""
    return cast("WorkerClaims[ClaimedTask]", worker.claims)


def config(**settings: Any) -> WorkerConfig:
    settings.setdefault("scanners", False)
    return WorkerConfig(**settings)


async def until(
    condition: Callable[[], bool | Awaitable[bool]], what: str = "it", timeout: float = 10.0
) -> None:
    """Wait for a condition that no event announces; fail when it does not come true."""
    deadline = time.monotonic() + timeout
    while True:
        answer = condition()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert time.monotonic() < deadline, f"{what} did not happen in {timeout:g} s"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    worker: Worker,
    handlers: Mapping[str, Handler],
    *,
    on_unknown_kind: Any = "fail",
    **run: Any,
) -> AsyncGenerator[WorkerRuntime]:
    """A runtime in the background of the block; afterwards every permit must be free."""
    runtime = WorkerRuntime(worker, on_unknown_kind=on_unknown_kind)
    for kind, handler in handlers.items():
        runtime.on(kind, handler)
    task = asyncio.create_task(runtime.run(**run))
    try:
        yield runtime
    finally:
        runtime.stop()
        await task
    assert worker.free == worker.config.permits


async def submit(
    backend: Backend,
    count: int = 1,
    *,
    kind: str = "job",
    lane: str = "default",
    policy: Mapping[str, Any] | None = None,
    partition: int | None = None,
    **fields: Any,
) -> list[ExecutionId]:
    """Create executions of a lane, in its own partition unless another is named."""
    parsed = None if policy is None else parse_policy(dict(policy))
    ids = list(ExecutionId.mint_solo_many(lane, backend.counts, count))
    if partition is not None:
        ids = [ExecutionId.parse(f"{{fp:{partition}}}:{i.rpartition(':')[2]}") for i in ids]
    outcomes = await backend.executions.create_many(
        [
            NewExecution(execution_id=i, execution_kind=kind, lane_id=lane, policy=parsed, **fields)
            for i in ids
        ]
    )
    for outcome in outcomes:
        assert not isinstance(outcome, Exception), outcome
    return ids


async def info(backend: Backend, execution_id: ExecutionId) -> ExecutionInfo:
    return await backend.reads.read_execution_info(execution_id)


async def state(backend: Backend, execution_id: ExecutionId) -> str:
    return (await backend.reads.read_execution_state(execution_id)).value


def seeded(name: str) -> random.Random:
    """The random source of a test: prints its seed, and takes it from FF_TEST_SEED."""
    seed = int(os.environ.get("FF_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"{name}: FF_TEST_SEED={seed}")  # noqa: T201
    return random.Random(seed)


RETRY = {
    "retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 60_000}},
}


async def claimed(worker: Worker, engine: Engine, **fields: Any) -> ClaimedTask:
    await submit(engine.backend, **fields)
    task = await worker.claim()
    assert task is not None
    return task


def valkey_of(owner: Worker | Client) -> Any:
    """The backend of a worker or client, with what only the one on Valkey has."""
    return owner.backend


def valkey_location(app: Fabric) -> ValkeyLocation:
    """Where an application finds its own Valkey."""
    assert isinstance(app.location._at, ValkeyLocation)
    return app.location._at
