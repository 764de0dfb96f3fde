"""Everything the engine knows about one execution."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from flowfabric.cli.reads.waits import LastWait, read_last_wait, read_open_waitpoints
from flowfabric.cli.reads.workers import read_live_workers
from flowfabric.cli.views.text import preview
from flowfabric.core.contracts.events import Event
from flowfabric.core.contracts.executions import (
    AttemptRecord,
    ExecutionInfo,
    LeaseSummary,
    WhyWaiting,
)
from flowfabric.core.contracts.suspension import OpenWaitpoint
from flowfabric.core.errors import NotFoundError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import ExecutionPolicy
from flowfabric.core.state import LifecyclePhase
from flowfabric.engine.valkey.backend import ValkeyBackend

_PREVIEW = 400


class Blob(msgspec.Struct, frozen=True):
    """A payload or result: as text if it is UTF-8, otherwise as hex."""

    size: int
    encoding: str
    form: str
    preview: str
    truncated: bool

    @classmethod
    def of(cls, data: bytes, encoding: str, *, full: bool) -> Blob:
        """The bytes, shortened unless `full`."""
        shown, form, truncated = preview(data, None if full else _PREVIEW)
        return cls(len(data), encoding, form, shown, truncated)


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """What `flowfabric show --json` prints."""

    execution: ExecutionInfo
    lease: LeaseSummary | None
    tags: Mapping[str, str]
    policy: ExecutionPolicy
    attempts: list[AttemptRecord]
    history: list[Event]
    payload: Blob | None
    result: Blob | None
    why_not_running: WhyWaiting | None
    workers_of_lane: list[str] | None
    """Live workers that can run it; None if it has finished."""
    waitpoints: list[OpenWaitpoint]
    """Open waitpoints, without their tokens."""
    wait: LastWait | None
    """The newest suspension, open or closed."""
    now_ms: int

    @property
    def running(self) -> bool:
        """Whether a worker holds a live lease on it."""
        return self.lease is not None and self.lease.expires_at > self.now_ms


async def read_detail(backend: ValkeyBackend, execution_id: ExecutionId, *, full: bool) -> Detail:
    """Read it all. Raises `execution_not_found` if the execution is deleted meanwhile."""
    (info, result), snapshot, policy, context, now = await asyncio.gather(
        backend.reads.read_outcome(execution_id),
        backend.reads.describe_execution(execution_id),
        backend.reads.read_execution_policy(execution_id),
        backend.reads.read_execution_context(execution_id),
        backend.meta.server_time_ms(),
    )
    attempts, history, why, waitpoints, wait = await asyncio.gather(
        backend.reads.read_attempts(execution_id),
        backend.reads.read_execution_history(execution_id),
        backend.reads.explain_execution(execution_id),
        read_open_waitpoints(backend, execution_id),
        read_last_wait(backend, execution_id),
    )
    if snapshot is None:
        raise NotFoundError("execution_not_found", str(execution_id))
    unfinished = info.state_vector.lifecycle_phase is not LifecyclePhase.TERMINAL
    return Detail(
        execution=info,
        lease=snapshot.current_lease,
        tags=snapshot.tags,
        policy=policy,
        attempts=attempts,
        history=history,
        payload=_blob(context.input_payload or None, info.payload_encoding, full=full),
        result=_blob(result, info.result_encoding, full=full),
        why_not_running=why if unfinished else None,
        workers_of_lane=await _able_workers(backend, info, now) if unfinished else None,
        waitpoints=waitpoints,
        wait=wait,
        now_ms=now,
    )


def _blob(data: bytes | None, encoding: str, *, full: bool) -> Blob | None:
    return None if data is None else Blob.of(data, encoding, full=full)


async def _able_workers(backend: ValkeyBackend, info: ExecutionInfo, now_ms: int) -> list[str]:
    needed = set(info.required_capabilities)
    return [
        worker.worker_instance_id
        for worker in await read_live_workers(backend, now_ms)
        if info.lane_id in worker.lanes and needed <= set(worker.capabilities)
    ]
