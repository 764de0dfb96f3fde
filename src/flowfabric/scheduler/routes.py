"""Executions that were blocked because no live worker could take them."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from flowfabric.core import capabilities as caps
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import stored_id
from flowfabric.core.state import BlockingReason
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.upkeep import Index
from flowfabric.engine.api.workers import WorkerEntry

BLOCKED = "blocked:route"
FOR_ROUTE = BlockingReason.WAITING_FOR_CAPABLE_WORKER.value
_PAGE = 100
_FIELDS = ("namespace", "required_capabilities", "offered_to", "execution_kind")


async def release_routes(backend: Backend, places: Mapping[str, Iterable[str]]) -> int:
    """Release those that a single live worker of their namespace and lane covers; how many.

    `places` are the lanes of each partition's tag.
    """
    indexes = [Index(tag, BLOCKED, lane) for tag, lanes in places.items() for lane in lanes]
    if not indexes or not await backend.upkeep.any_exists(indexes):
        return 0
    fleet = await read_fleet(backend)
    return sum([await _release(backend, index, fleet) for index in indexes])


async def read_fleet(backend: Backend) -> list[WorkerEntry] | None:
    """All live workers; None if they cannot be read."""
    try:
        return await backend.workers.list_workers(None, limit=None)
    except EngineError:
        return None


async def _release(backend: Backend, index: Index, fleet: Sequence[WorkerEntry] | None) -> int:
    kept = released = 0
    while ids := await backend.upkeep.list_index(index, kept, _PAGE):
        done = await release_covered(backend, index, ids, fleet)
        released += done
        kept += len(ids) - done
    return released


async def release_covered(
    backend: Backend, index: Index, ids: Sequence[str], fleet: Sequence[WorkerEntry] | None
) -> int:
    """Release those of a lane's blocked executions that a worker covers; how many.

    One that cannot be read is released, too: the next claim decides again.
    """
    covered = list(ids)
    if fleet is not None:
        verdicts = await asyncio.gather(
            *(_is_covered(backend, each, index.lane, fleet) for each in ids)
        )
        covered = [each for each, verdict in zip(ids, verdicts, strict=True) if verdict]
    outcomes = await backend.admission.unblock_many(index.tag, covered, FOR_ROUTE)
    return sum(outcome is None for outcome in outcomes)


async def _is_covered(
    backend: Backend, member: str, lane_id: str, fleet: Iterable[WorkerEntry]
) -> bool:
    try:
        execution_id = stored_id(member, BLOCKED)
        fields = await backend.reads.read_exec_core_fields(execution_id, _FIELDS)
        required = frozenset(caps.from_csv(fields["required_capabilities"] or ""))
    except EngineError:
        return True
    namespace, kind = fields["namespace"] or "default", fields["execution_kind"] or ""
    must_know = fields["offered_to"] is not None
    return any(
        worker.serves(lane_id, namespace)
        and worker.knows(kind, required=must_know)
        and required.issubset(worker.capabilities)
        for worker in fleet
    )
