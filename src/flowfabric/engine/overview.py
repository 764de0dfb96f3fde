"""Reports about executions for people, read only through the engine's interface."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from flowfabric.core.contracts import executions
from flowfabric.core.contracts.budgets import Exhausted
from flowfabric.core.contracts.executions import ExecutionInfo, ExecutionPage, ExecutionSummary
from flowfabric.core.contracts.quotas import FullQuota
from flowfabric.core.contracts.suspension import OpenWaitpoint, ResumeSignal
from flowfabric.core.errors import CorruptionError, EngineError, NotFoundError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import ExecutionPolicy
from flowfabric.core.state import LifecyclePhase, PublicState
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.events import Event
from flowfabric.engine.api.reads import Filter
from flowfabric.engine.api.waitpoints import LastWait
from flowfabric.engine.flow_overview import Membership, read_membership
from flowfabric.engine.paging import read_every, read_pages

_PAGE = 1000
_PAGES = 10
"""How many pages to read unless the caller asks for everything: about a second of work."""
_NEVER = 2**63
_SIGNALS = 50
STARTS_NEXT = (PublicState.WAITING, PublicState.RATE_LIMITED)
"""The states of executions that would start if nothing held them back."""


class ExecutionListing(msgspec.Struct, frozen=True):
    """The newest executions, and how many there are in each state."""

    rows: list[ExecutionSummary]
    states: Counter[str]
    complete: bool
    """Whether every execution was read, or only the first pages."""
    now_ms: int


def matching(backend: Backend, where: Filter) -> AsyncGenerator[ExecutionPage]:
    """The pages of a listing, to its end."""
    return read_pages(
        lambda cursor: backend.listings.list_executions(cursor=cursor, limit=_PAGE, where=where)
    )


async def list_newest(backend: Backend, where: Filter, limit: int | None) -> ExecutionListing:
    """The newest executions that match; without a limit, all of them."""
    found: list[ExecutionSummary] = []
    states: Counter[str] = Counter()
    pages, complete = 0, False
    async for page in matching(backend, where):
        states.update(row.public_state.value for row in page.executions)
        found += page.executions
        found.sort(key=lambda row: (-int(row.created_at), row.execution_id))
        del found[limit or len(found) :]
        pages += 1
        complete = page.next_cursor is None
        if limit is not None and pages == _PAGES:
            break
    return ExecutionListing(found, states, complete, await backend.meta.server_time_ms())


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """What an execution waits for."""

    execution_id: ExecutionId
    execution_kind: str
    lane_id: str
    namespace: str
    public_state: PublicState
    reason: str
    since: int | None
    """When it was suspended; None if it is not."""
    until: int | None
    """When the wait times out; None if it does not."""
    waitpoints: list[OpenWaitpoint]
    prompt: str | None = None
    """What is asked, for people."""
    details: Any = None
    """What the question is about, as decoded JSON."""


async def read_open_waitpoints(backend: Backend, execution_id: ExecutionId) -> list[OpenWaitpoint]:
    """All open waitpoints; those of the current suspension first."""
    found = await read_every(
        lambda after: backend.waitpoints.list_pending_waitpoints(execution_id, after, _PAGE)
    )
    return sorted(found, key=lambda one: (one.state != "active", one.created_at, one.waitpoint_key))


def named(waitpoints: list[OpenWaitpoint], name: str) -> list[OpenWaitpoint]:
    """The waitpoints with this id or key. A handler's second wait under a key has a number."""
    found = [one for one in waitpoints if name in (one.waitpoint_id, one.waitpoint_key)]
    numbered = (name, "#")
    return found or [w for w in waitpoints if w.waitpoint_key.rpartition("#")[:2] == numbered]


async def read_wait(backend: Backend, execution_id: ExecutionId) -> tuple[Wait, LastWait | None]:
    """What an execution in any state waits for, and its newest suspension."""
    info, waitpoints, last = await asyncio.gather(
        backend.reads.read_execution_info(execution_id),
        read_open_waitpoints(backend, execution_id),
        backend.waitpoints.read_last_wait(execution_id),
    )
    current = last if info.public_state is PublicState.SUSPENDED else None
    wait = Wait(
        execution_id=info.execution_id,
        execution_kind=info.execution_kind,
        lane_id=info.lane_id,
        namespace=info.namespace,
        public_state=info.public_state,
        reason="" if current is None else current.reason,
        since=None if current is None else current.since,
        until=None if current is None else current.until,
        waitpoints=waitpoints,
        prompt=None if current is None else current.prompt,
        details=None if current is None else current.details,
    )
    return wait, last


async def list_waits(
    backend: Backend, *, lane: str | None, namespace: str | None, limit: int
) -> tuple[list[Wait], int]:
    """Suspended executions, soonest timeout first, and how many the limit left out."""
    entries = await read_every(
        lambda cursor: backend.suspensions.list_suspended(cursor=cursor, limit=_PAGE)
    )
    reads = backend.reads
    entries = [
        one
        for one in entries
        if (lane is None or one.lane_id == lane)
        and (
            namespace is None or await reads.get_execution_namespace(one.execution_id) == namespace
        )
    ]
    entries.sort(key=lambda one: (one.timeout_at or _NEVER, one.suspended_at, one.execution_id))
    read = await asyncio.gather(
        *(_read_if_suspended(backend, one.execution_id) for one in entries[:limit])
    )
    return [wait for wait in read if wait is not None], max(0, len(entries) - limit)


async def _read_if_suspended(backend: Backend, execution_id: ExecutionId) -> Wait | None:
    """The wait; None if it was answered or deleted since it was listed."""
    try:
        wait, _ = await read_wait(backend, execution_id)
    except NotFoundError:
        return None
    return wait if wait.public_state is PublicState.SUSPENDED else None


class ReachedLimits(msgspec.Struct, frozen=True):
    """The limits that keep an execution from starting."""

    budgets: tuple[Exhausted, ...] = ()
    quota: FullQuota | None = None


async def read_limits(
    backend: Backend, execution_id: ExecutionId, state: PublicState
) -> ReachedLimits:
    """Which limits of an execution are reached now; only for one that waits to start.

    A limit that cannot be read is left out; `blocking_detail` names it.
    """
    if state not in STARTS_NEXT:
        return ReachedLimits()
    (named,) = await backend.admission.read_candidates([execution_id])
    if isinstance(named, EngineError):
        raise named
    budgets, quota = await asyncio.gather(
        backend.budgets.exhausted(named.budget_ids), _read_quota(backend, named.quota_policy_id)
    )
    spent = [budgets[each] for each in named.budget_ids]
    return ReachedLimits(tuple(each for each in spent if isinstance(each, Exhausted)), quota)


async def _read_quota(backend: Backend, quota_policy_id: str | None) -> FullQuota | None:
    if quota_policy_id is None:
        return None
    try:
        return (await backend.quotas.get_quota_status(quota_policy_id)).full
    except (NotFoundError, CorruptionError):
        return None


class ExecutionDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one execution."""

    execution: ExecutionInfo
    lease: executions.LeaseSummary | None
    tags: Mapping[str, str]
    policy: ExecutionPolicy
    attempts: list[executions.AttemptRecord]
    history: list[Event]
    payload: bytes | None
    result: bytes | None
    why_not_running: executions.WhyWaiting | None
    """None if it has finished."""
    limits: ReachedLimits
    """The budgets and the quota that keep it from starting."""
    waitpoints: list[OpenWaitpoint]
    """Open waitpoints, without their tokens."""
    wait: LastWait | None
    """The newest suspension, open or closed."""
    signals: list[ResumeSignal]
    """The signals that earlier waits received, oldest first; at most the newest 50."""
    membership: Membership | None
    """Its flow, and its upstreams there."""
    now_ms: int

    @property
    def running(self) -> bool:
        """Whether a worker holds a live lease on it."""
        return self.lease is not None and self.lease.expires_at > self.now_ms


async def read_detail(backend: Backend, execution_id: ExecutionId) -> ExecutionDetail:
    """Read everything. Raises `execution_not_found` if the execution is deleted meanwhile."""
    reads = backend.reads
    (info, result), snapshot, policy, context, now = await asyncio.gather(
        reads.read_outcome(execution_id),
        reads.describe_execution(execution_id),
        reads.read_execution_policy(execution_id),
        reads.read_execution_context(execution_id),
        backend.meta.server_time_ms(),
    )
    attempts, history, why, waitpoints, wait, signals = await asyncio.gather(
        reads.read_attempts(execution_id),
        reads.read_execution_history(execution_id),
        reads.explain_execution(execution_id),
        read_open_waitpoints(backend, execution_id),
        backend.waitpoints.read_last_wait(execution_id),
        _read_signals(backend, execution_id),
    )
    if snapshot is None:
        raise NotFoundError("execution_not_found", str(execution_id))
    finished = info.state_vector.lifecycle_phase is LifecyclePhase.TERMINAL
    return ExecutionDetail(
        execution=info,
        lease=snapshot.current_lease,
        tags=snapshot.tags,
        policy=policy,
        attempts=attempts,
        history=history,
        payload=context.input_payload or None,
        result=result,
        why_not_running=None if finished else why,
        limits=await read_limits(backend, execution_id, info.public_state),
        waitpoints=waitpoints,
        wait=wait,
        signals=signals,
        membership=await read_membership(backend, info),
        now_ms=now,
    )


async def _read_signals(backend: Backend, execution_id: ExecutionId) -> list[ResumeSignal]:
    past = await backend.waitpoints.read_waits(execution_id)
    past.sort(key=lambda wait: wait.closed_at)
    named = [(each, wait.waitpoint_key) for wait in past for each in wait.signal_ids]
    read = (backend.waitpoints.read_signal(execution_id, *one) for one in named[-_SIGNALS:])
    found = [signal for signal in await asyncio.gather(*read) if signal is not None]
    return sorted(found, key=lambda signal: signal.accepted_at)
