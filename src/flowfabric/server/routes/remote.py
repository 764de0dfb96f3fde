"""Work for workers in any language: claiming, renewing and completing over HTTP."""

from base64 import b64decode
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from flowfabric.core.contracts import executions, leases
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.remote import RemoteClaims
from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.engine.api.executions import Completion
from flowfabric.server import bodies
from flowfabric.server.batches import Row, done, failed, in_order
from flowfabric.server.bodies import Byte, payload_of
from flowfabric.server.calls import Call
from flowfabric.server.problems import Problem, invalid
from flowfabric.server.queries import NoQuery, WaitQuery
from flowfabric.server.remote_claims import RemoteClaimBody
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import RemoteCompleted, RemoteRenewed
from flowfabric.server.wire import Reply, answer, variant

routes = Routes()
_MAX_ITEMS = 1000
T = TypeVar("T", bound="Attempted")
R = TypeVar("R")


class Attempted(msgspec.Struct, frozen=True, kw_only=True):
    """About one attempt, which its handle names."""

    handle: str
    """As it was received with the claim."""

    def held(self, call: Call[Any, Any]) -> Handle:
        """The handle, if it has the right form; whether it is current is for the engine to say."""
        try:
            handle = Handle.decode(b64decode(self.handle, validate=True))
        except (ValueError, CorruptionError):
            raise invalid("handle", "is malformed; send it as the claim returned it") from None
        handle.execution_id.check_partition(call.backend.counts)
        return handle


async def read_items(
    call: Call[Any, Any],
    items: list[msgspec.Raw],
    kind: type[T],
    make: Callable[[T, Handle], R],
) -> tuple[list[Row], dict[int, R]]:
    """The rows of all items, filled for refused ones, and the other items by position."""
    rows: list[Row] = [{}] * len(items)
    found: dict[int, R] = {}
    for i, raw in enumerate(items):
        try:
            item = bodies.decode(bytes(raw), kind)
            handle = item.held(call)
            await call.visible(handle.execution_id)
            found[i] = make(item, handle)
        except (Problem, EngineError) as error:
            rows[i] = failed(error)
    return rows, found


def check_items(items: list[msgspec.Raw], least: int = 1) -> list[msgspec.Raw]:
    """The items, unless there are too many."""
    if not least <= len(items) <= _MAX_ITEMS:
        raise invalid("items", f"must contain {least} to {_MAX_ITEMS} items, got {len(items)}")
    return items


class RawItems(msgspec.Struct, frozen=True, kw_only=True):
    """Items that are decoded one by one: a broken one does not affect the others."""

    items: list[msgspec.Raw]


async def each_item(
    call: Call[RawItems, NoQuery], kind: type[T], act: Callable[[T, Handle], Awaitable[Any]]
) -> Reply:
    """Act on every item, those of one execution in order; one row per item."""
    return answer({"results": await rows_of(call, check_items(call.body.items), kind, act)})


async def rows_of(
    call: Call[Any, NoQuery],
    items: list[msgspec.Raw],
    kind: type[T],
    act: Callable[[T, Handle], Awaitable[Any]],
) -> list[Row]:
    """The outcome of every item."""
    rows, found = await read_items(call, items, kind, lambda item, handle: (item, handle))
    groups: dict[str, list[int]] = {}
    for i, (_, handle) in found.items():
        groups.setdefault(handle.execution_id, []).append(i)

    async def one(position: int) -> None:
        item, handle = found[position]
        try:
            rows[position] = done(await act(item, handle))
        except (Problem, EngineError) as error:
            rows[position] = failed(error, handle.execution_id)

    await in_order(list(groups.values()), one)
    return rows


class EndingItems(RawItems, frozen=True, kw_only=True):
    """Attempts that ended; with `claim`, the next ones are claimed in the same call."""

    claim: RemoteClaimBody | None = None


def ended_items(call: Call[EndingItems, NoQuery]) -> list[msgspec.Raw]:
    """The items; raises an error if the whole call must be refused."""
    body = call.body
    if body.claim is not None:
        # A claim that cannot be made must not hide the outcome of the items.
        body.claim.worker(call.caller)
    return check_items(body.items, 0 if body.claim is not None else 1)


async def then_claim(call: Call[EndingItems, NoQuery], rows: list[Row]) -> Reply:
    """The rows of what ended, and the claims if some were asked for."""
    body = call.body
    if body.claim is None:
        return answer({"results": rows})
    try:
        found = await call.services.remote.claim(body.claim, call.caller, call.request)
    except (Problem, EngineError) as error:
        return answer({"results": rows, "claim_error": failed(error)})
    return answer({"results": rows, **msgspec.structs.asdict(found)})


@routes.post(
    "/v1/remote/claim",
    scope="remote",
    limit="medium",
    answers={200: RemoteClaims},
    counted=False,
    errors=(503,),
)
async def remote_claim(call: Call[RemoteClaimBody, WaitQuery]) -> Reply:
    """Claim work for a worker; with `wait_ms`, wait for it.

    The worker is registered by this call. With `max` 0 the call claims nothing and shows that the
    worker is alive.
    """
    with call.services.remote_claims:
        found = await call.services.remote.claim(
            call.body, call.caller, call.request, call.query.wait_ms
        )
    return answer(found)


class RenewItem(Attempted, frozen=True, kw_only=True):
    """A lease to extend."""


class RenewBody(RawItems, frozen=True, kw_only=True):
    """Leases to extend, and where their worker is registered."""

    namespace: str | None = None


class RenewItems(msgspec.Struct, frozen=True, kw_only=True):
    """Leases to extend, and where their worker is registered."""

    items: list[RenewItem]
    namespace: str | None = None


@routes.post(
    "/v1/remote/renew",
    scope="remote",
    limit="bulk",
    documented=RenewItems,
    answers={200: RemoteRenewed},
)
async def remote_renew(call: Call[RenewBody, NoQuery]) -> Reply:
    """Extend leases by their time to live. A row with 404 or 409 means a lost lease: stop work."""
    items = check_items(call.body.items)
    rows, found = await read_items(call, items, RenewItem, lambda _, handle: handle)
    handles = list(found.values())
    outcomes = await call.backend.leases.renew_many(handles)
    for (i, handle), outcome in zip(found.items(), outcomes, strict=True):
        if isinstance(outcome, leases.Renewed):
            rows[i] = done(variant(outcome))
        else:
            rows[i] = failed(outcome, handle.execution_id)
    draining = False
    namespace = "default" if call.body.namespace is None else call.body.namespace
    if call.caller.sees(namespace):
        for instance in {handle.worker_instance_id for handle in handles}:
            draining |= await call.services.remote.fleet.renews(instance, namespace)
    return answer({"results": rows, "draining": draining})


class CompleteItem(Attempted, frozen=True, kw_only=True):
    """An attempt that succeeded, and its result."""

    result: list[Byte] | None = None
    result_b64: bytes | None = None
    result_encoding: str | None = None


class CompleteItems(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts that succeeded; with `claim`, the next ones are claimed in the same call."""

    items: list[CompleteItem]
    claim: RemoteClaimBody | None = None


@routes.post(
    "/v1/remote/complete",
    scope="remote",
    limit="bulk",
    documented=CompleteItems,
    answers={200: RemoteCompleted},
)
async def remote_complete(call: Call[EndingItems, NoQuery]) -> Reply:
    """Complete attempts; with `claim`, also claim the next ones. The claim does not wait."""

    def completion(item: CompleteItem, handle: Handle) -> Completion:
        result = payload_of(item.result, item.result_b64, "result")
        return Completion(handle, result, item.result_encoding or "")

    rows, found = await read_items(call, ended_items(call), CompleteItem, completion)
    complete_many = call.backend.executions.complete_many
    outcomes = await complete_many(list(found.values())) if found else []
    for (i, completed), outcome in zip(found.items(), outcomes, strict=True):
        if isinstance(outcome, executions.Completed):
            rows[i] = done(variant(outcome, "cascade"))
        else:
            rows[i] = failed(outcome, completed.handle.execution_id)
    return await then_claim(call, rows)
