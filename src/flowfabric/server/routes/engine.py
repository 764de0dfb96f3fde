"""The engine for our own clients: each operation of `engine/http/operations.py` is a route.

Clients in other languages use the other routes: these follow the Python interface, and change with
it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec

from flowfabric.core.contracts.executions import ExecutionPage, NewExecution
from flowfabric.core.contracts.flows import FlowGraph
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import NotFoundError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.version import __version__
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.http import codec
from flowfabric.engine.http.backend import EngineDescription
from flowfabric.engine.http.feeds import FeedEntry
from flowfabric.engine.http.operations import ROOT, Operation, operations
from flowfabric.server import bodies
from flowfabric.server.calls import Call
from flowfabric.server.exchange import ClientGone
from flowfabric.server.problems import Problem, closing
from flowfabric.server.queries import NoQuery
from flowfabric.server.routing import Route, Routes
from flowfabric.server.wire import Reply

routes = Routes()
_MAX_WAIT_MS = 600_000
"""Longer than the default wait of any operation."""
_Call = Call[bytes, NoQuery]


@routes.get(ROOT, scope="read", internal=True, answers={200: EngineDescription})
async def describe_engine(call: Call[None, NoQuery]) -> Reply:
    """Describe the deployment to a client that connects."""
    backend = call.backend
    described = EngineDescription(
        version=__version__,
        counts=backend.counts,
        max_payload_bytes=backend.max_payload_bytes,
        capabilities=backend.meta.capabilities(),
    )
    return Reply(200, codec.encode(described))


def _route(operation: Operation) -> Route:
    async def serve(call: _Call) -> Reply:
        given = _decoded(operation, call.body)
        restricted = call.caller.namespaces is not None
        if restricted and "many" in operation.marks:
            result = await _run_visible(call, operation, given)
        else:
            if restricted and "rows" not in operation.marks:
                await _check(call, operation, given)
            result = await _run(call, operation, given)
        if restricted and "rows" in operation.marks:
            result = await _visible(call, result)
        return Reply(200, codec.encode_escaped(codec.encode_as(operation.result, result)))

    return Route(
        method="POST",
        template=operation.path,
        handler=serve,
        scope=operation.scope,
        body=bytes,
        limit="bulk" if "bulk" in operation.marks else "control",
        internal=True,
    )


def _decoded(operation: Operation, body: bytes) -> dict[str, Any]:
    try:
        return operation.given(bodies.decode_with(operation.decoder, body))
    except Problem as problem:
        if ".policy." in problem.detail.partition(":")[0]:
            problem.code = problem.kind = "invalid_policy_json"
        raise


async def _run(call: _Call, operation: Operation, given: Mapping[str, Any]) -> Any:
    services = call.services
    concern = services.feeds if operation.noun == "feeds" else getattr(call.backend, operation.noun)
    if "waits" not in operation.marks:
        return await operation.call(concern, given)
    found: list[Any] = []

    async def wait() -> bool:
        found.append(await operation.call(concern, given))
        return True

    if await call.until(wait, _MAX_WAIT_MS):
        return found[0]
    if services.stopping.is_set():
        raise closing(operation.name)
    raise ClientGone


async def _run_visible(call: _Call, operation: Operation, given: Mapping[str, Any]) -> list[Any]:
    """The outcome of every item; what the caller may not see is reported as not found."""
    name, items = next(iter(given.items()))
    rows: list[Any] = []
    kept: list[Any] = []
    for item in items:
        try:
            await _check_value(call, name, item)
            rows.append(None)
            kept.append(item)
        except NotFoundError as error:
            rows.append(error)
    found = iter(await _run(call, operation, {**given, name: kept}) if kept else ())
    return [next(found) if row is None else row for row in rows]


async def _check(call: _Call, operation: Operation, given: Mapping[str, Any]) -> None:
    """Refuse arguments that a token limited to namespaces may not use."""
    named = 0
    for name, value in {**_defaults(operation), **given}.items():
        named += await _check_value(call, name, value)
    if not named and "open" not in operation.marks:
        call.require_all_namespaces()


def _defaults(operation: Operation) -> dict[str, Any]:
    parameters = operation.signature.parameters
    return {"namespace": parameters["namespace"].default} if "namespace" in parameters else {}


async def _check_value(call: _Call, name: str, value: Any) -> int:
    """How many namespaces, executions or flows a value names; each must be the caller's own."""
    match value:
        case ExecutionId():
            await call.visible(value)
        case Handle() | Completion():
            held = value if isinstance(value, Handle) else value.handle
            await call.visible(held.execution_id)
        case NewExecution() | FlowGraph():
            call.check_namespace(value.namespace)
            if isinstance(value, NewExecution) and value.flow_id is not None:
                await call.visible_flow(value.flow_id)
        case str() if name == "flow_id":
            await call.visible_flow(value)
        case str() if name in ("namespace", "namespaces"):
            call.check_namespace(value)
        case str() if name in ("feed", "feeds", "positions") and value.startswith("worker:"):
            call.check_namespace(value.removeprefix("worker:"))
        case None if name == "namespace":
            call.require_all_namespaces()
        case list() | tuple() | dict() if name != "tags":
            each = [await _check_value(call, name, one) for one in cast("Iterable[Any]", value)]
            return sum(each)
        case _:
            return 0
    return 1


async def _visible(call: _Call, result: Any) -> Any:
    """The rows of a result that belong to the caller's namespaces."""
    if isinstance(result, list | set):
        rows = cast("list[Any]", result)
        return [each for each in rows if await _sees(call, each)]
    if isinstance(result, dict):
        pages = cast("dict[str, list[FeedEntry]]", result)
        return {feed: [_hidden(call, each) for each in page] for feed, page in pages.items()}
    field = "executions" if isinstance(result, ExecutionPage) else "entries"
    rows = [each for each in getattr(result, field) if await _sees(call, each)]
    kept = tuple(rows) if isinstance(getattr(result, field), tuple) else rows
    return msgspec.structs.replace(result, **{field: kept, "damaged": ()})


def _hidden(call: _Call, entry: FeedEntry) -> FeedEntry:
    seen = entry.event is not None and call.caller.sees(entry.event.namespace)
    return entry if seen else FeedEntry(entry.position)


async def _sees(call: _Call, row: Any) -> bool:
    namespace: str | None = getattr(row, "namespace", None)
    if isinstance(row, str) and row.startswith("worker:"):
        namespace = row.removeprefix("worker:")
    elif isinstance(row, str) and not isinstance(row, ExecutionId):
        flow = await call.backend.flows.describe_flow(row, edge_groups=False)
        namespace = None if flow is None else flow.namespace
    elif namespace is None:
        execution_id = row if isinstance(row, ExecutionId) else row.execution_id
        namespace = await call.backend.reads.get_execution_namespace(execution_id)
    return namespace is not None and call.caller.sees(namespace)


routes.found += [_route(each) for noun in operations().values() for each in noun.values()]
