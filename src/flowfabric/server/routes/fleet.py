"""Lanes, workers and leases (10 §3.7)."""

import base64
from typing import Annotated, Any, TypeVar

import msgspec

from flowfabric.engine.api.leases import ExpiredLease
from flowfabric.engine.api.places import LANE_STATES, PLACEMENTS, LaneDetail
from flowfabric.engine.api.workers import Draining, NotRegistered, WorkerEntry, WorkerLease
from flowfabric.server.bodies import U32, U64, OfInstance, OfLane, words
from flowfabric.server.calls import Call
from flowfabric.server.problems import Problem
from flowfabric.server.queries import AnyLimit, NoQuery, PageQuery
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import Listed, variants
from flowfabric.server.wire import Reply, answer, encode, struct, tagged, variant, variant_name

routes = Routes()
_DRAIN_MS = 30_000
P = TypeVar("P", bound=tuple[int | str, ...])


@routes.get("/v1/lanes", scope="read", answers={200: Listed("lanes", str)})
async def list_lanes(call: Call[None, PageQuery]) -> Reply:
    """List lanes by name."""
    names, more = await call.backend.lanes.list_lanes(call.query.cursor, call.query.size)
    return answer({"lanes": names, "next_cursor": more})


@routes.get("/v1/lanes/{lane}", scope="read", answers={200: LaneDetail}, errors=(404,))
async def read_lane(call: Call[None, NoQuery]) -> Reply:
    """Read the settings of a lane, and how many executions it has in each state."""
    return answer(struct(await call.backend.lanes.get_lane(call.lane())))


class LaneState(OfLane, frozen=True, kw_only=True):
    """The new state of a lane."""

    state: Annotated[str, words(LANE_STATES)]
    reason: str | None = None


@routes.put("/v1/lanes/{lane}/state", scope="operate", answers={200: dict[str, dict[str, str]]})
async def set_lane_state(call: Call[LaneState, NoQuery]) -> Reply:
    """Pause, drain, disable or re-activate a lane."""
    lane, body = call.lane(), call.body
    call.require_all_namespaces()
    previous = await call.backend.lanes.set_lane_state(lane, body.state, body.reason or "")
    return answer(tagged("set", {"previous": previous}))


class LaneConfig(OfLane, frozen=True, kw_only=True):
    """Settings of a lane to change; at least one."""

    placement: Annotated[str, words(PLACEMENTS)] | None = None
    shards: U32 | None = None
    priority_weight_ms: U64 | None = None
    reclaim_grace_ms: U64 | None = None
    emit_renewals: bool | None = None


@routes.put("/v1/lanes/{lane}/config", scope="operate", answers={200: str})
async def set_lane_config(call: Call[LaneConfig, NoQuery]) -> Reply:
    """Change the settings of a lane."""
    lane = call.lane()
    call.require_all_namespaces()
    fields = struct(call.body)
    del fields["lane_id"]
    await call.backend.lanes.set_lane_config(lane, **fields)
    return answer("Set")


class WorkersQuery(PageQuery, frozen=True, kw_only=True):
    """Which workers to list."""

    namespace: str | None = None


@routes.get("/v1/workers", scope="read", answers={200: Listed("workers", WorkerEntry)})
async def list_workers(call: Call[None, WorkersQuery]) -> Reply:
    """List live worker processes by instance id."""
    query = call.query
    after = " ".join(_position(query.cursor, tuple[str, str]) or ())
    if not query.size:
        return answer({"workers": [], "next_cursor": None})
    found = await call.backend.workers.list_workers(query.namespace, after, query.size + 1)
    page = found[: query.size]
    more = _sealed(tuple(page[-1].cursor.split(" "))) if len(found) > len(page) else None
    rows = [struct(worker) for worker in page if call.caller.sees(worker.namespace)]
    return answer({"workers": rows, "next_cursor": more})


class ExpiredQuery(PageQuery, frozen=True, kw_only=True):
    """Which expired leases to list."""

    as_of: AnyLimit | None = None
    namespace: str | None = None


@routes.get("/v1/leases/expired", scope="read", answers={200: Listed("leases", ExpiredLease)})
async def list_expired_leases(call: Call[None, ExpiredQuery]) -> Reply:
    """List leases that have expired, by expiry and execution id."""
    query = call.query
    page = await call.backend.leases.list_expired_leases(
        query.as_of,
        after=_position(query.cursor, tuple[int, str]),
        limit=query.size,
        namespace=query.namespace,
    )
    rows = await _visible_rows(call, [struct(lease) for lease in page.entries])
    return answer({"leases": rows, "next_cursor": _sealed(page.cursor)})


def _sealed(position: tuple[int | str, ...] | None) -> str | None:
    if position is None:
        return None
    return base64.urlsafe_b64encode(encode(position)).decode().rstrip("=")


def _position(cursor: str, kind: type[P]) -> P | None:
    if not cursor:
        return None
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        return msgspec.json.decode(raw, type=kind)
    except (ValueError, msgspec.MsgspecError):
        raise Problem("invalid_cursor", "cursor: must be one that this listing returned") from None


class NamespaceQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The namespace of a worker."""

    namespace: str = "default"


@routes.get(
    "/v1/workers/{instance}/leases", scope="read", answers={200: Listed("leases", WorkerLease)}
)
async def list_worker_leases(call: Call[None, PageQuery]) -> Reply:
    """List the leases that a worker process holds."""
    instance = call.worker("instance")
    page = await call.backend.workers.list_worker_leases(
        instance, call.query.cursor, call.query.size
    )
    rows = await _visible_rows(call, [struct(lease) for lease in page.entries])
    return answer({"leases": rows, "next_cursor": page.cursor})


async def _visible_rows(call: Call[Any, Any], rows: list[Any]) -> list[Any]:
    """The rows whose executions the caller may see."""
    if call.caller.namespaces is None:
        return rows
    namespace_of = call.backend.reads.get_execution_namespace
    return [row for row in rows if call.caller.sees(await namespace_of(row["execution_id"]))]


class DrainRequest(OfInstance, frozen=True, kw_only=True):
    """How long a worker may take to finish."""

    timeout_ms: U64 | None = None


@routes.post(
    "/v1/workers/{instance}/drain",
    scope="operate",
    optional_body=True,
    answers={200: variants(Draining, NotRegistered)},
)
async def drain_worker(call: Call[DrainRequest, NamespaceQuery]) -> Reply:
    """Stop giving work to a worker process. Leases that it holds after the timeout are revoked."""
    instance, namespace = call.worker("instance"), call.query.namespace
    call.check_namespace(namespace)
    timeout_ms = _DRAIN_MS if call.body.timeout_ms is None else call.body.timeout_ms
    outcome = await call.backend.workers.drain_worker(instance, namespace, timeout_ms=timeout_ms)
    return answer(variant(outcome))


class DeadRequest(OfInstance, frozen=True, kw_only=True):
    """Why a worker process is removed, and whether its leases are revoked."""

    reason: str | None = None
    revoke_leases: bool | None = None


@routes.post("/v1/workers/{instance}/dead", scope="operate", optional_body=True, answers={200: str})
async def mark_worker_dead(call: Call[DeadRequest, NamespaceQuery]) -> Reply:
    """Remove a worker process from the registry."""
    instance, namespace = call.worker("instance"), call.query.namespace
    call.check_namespace(namespace)
    outcome = await call.backend.workers.mark_worker_dead(
        instance, namespace, call.body.reason or "", revoke_leases=bool(call.body.revoke_leases)
    )
    return answer(variant_name(outcome))
