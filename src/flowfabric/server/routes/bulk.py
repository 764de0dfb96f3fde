"""Many creates or cancels in one request (10 §11.7)."""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from flowfabric.core.errors import EngineError
from flowfabric.server import bodies
from flowfabric.server.batches import done, failed, in_order
from flowfabric.server.calls import Call
from flowfabric.server.problems import Problem, invalid, not_json
from flowfabric.server.queries import NoQuery
from flowfabric.server.routes.executions import CancelRequest, CreateExecution
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import BulkAnswer
from flowfabric.server.wire import Reply, answer, variant

routes = Routes()
_MAX_ITEMS = 1000
_LINES = "application/x-ndjson"
T = TypeVar("T")


def _items(call: Call[bytes, NoQuery], kind: type[T]) -> list[T | Problem]:
    """The items of a body; a broken line or item is the problem in its place."""
    content_type = call.request.headers.get(b"content-type")
    lines = (content_type or b"").partition(b";")[0].strip().lower() == _LINES.encode()
    if lines:
        raw: Sequence[bytes | msgspec.Raw] = [
            line for line in call.body.splitlines() if line.strip()
        ]
    elif bodies.is_json(content_type):
        # The array itself is a level that a single item does not have.
        raw = bodies.decode(call.body, list[msgspec.Raw], bodies.MAX_DEPTH + 1)
    else:
        raise not_json(415)
    if len(raw) > _MAX_ITEMS:
        raise invalid("body", f"must contain at most {_MAX_ITEMS} items, got {len(raw)}")
    found: list[T | Problem] = []
    for each in raw:
        try:
            found.append(bodies.decode(bytes(each), kind))
        except Problem as problem:
            found.append(problem)
    return found


@routes.post(
    "/v1/bulk/executions",
    scope="submit",
    limit="bulk",
    documented=list[CreateExecution],
    forms=(_LINES,),
    answers={200: BulkAnswer},
)
async def create_many(call: Call[bytes, NoQuery]) -> Reply:
    """Create up to 1,000 executions; each item gets the result of a single create."""
    items = _items(call, CreateExecution)
    lanes = {item.lane_id or "default" for item in items if not isinstance(item, Problem)}
    await asyncio.gather(*map(call.backend.places.learn_lane, lanes))
    rows: list[Any] = [None] * len(items)
    new: list[Any] = []
    places: list[int] = []
    for i, item in enumerate(items):
        try:
            if isinstance(item, Problem):
                raise item
            call.check_namespace(item.namespace)
            if item.flow_id is not None:
                await call.visible_flow(item.flow_id)
            new.append(item.new(call.backend))
            places.append(i)
        except (Problem, EngineError) as error:
            rows[i] = failed(error)
    outcomes = await call.backend.executions.create_many(new)
    for i, wanted, outcome in zip(places, new, outcomes, strict=True):
        if isinstance(outcome, EngineError):
            rows[i] = failed(outcome, wanted.flow_id or "")
        else:
            rows[i] = done(variant(outcome), 201 if outcome.kind == "created" else 200)
    return answer({"results": rows})


@routes.post(
    "/v1/bulk/cancel",
    scope="operate",
    limit="bulk",
    documented=list[CancelRequest],
    forms=(_LINES,),
    answers={200: BulkAnswer},
)
async def cancel_many(call: Call[bytes, NoQuery]) -> Reply:
    """Cancel up to 1,000 executions; each item gets the result of a single cancel."""
    items = _items(call, CancelRequest)
    rows: list[Any] = [None] * len(items)
    by_partition: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        if isinstance(item, Problem):
            rows[i] = failed(item)
        else:
            by_partition.setdefault(item.execution_id.tag, []).append(i)

    async def cancel(position: int) -> None:
        item = items[position]
        assert not isinstance(item, Problem)
        try:
            source = item.check_source()
            execution_id = item.execution_id.check_partition(call.backend.counts)
            await call.visible(execution_id)
            outcome = await call.backend.executions.cancel_execution(
                execution_id, item.reason, source=source, fence=item.fence
            )
            rows[position] = done(variant(outcome, "cascade"))
        except (Problem, EngineError) as error:
            rows[position] = failed(error, item.execution_id)

    await in_order(list(by_partition.values()), cancel)
    return answer({"results": rows})
