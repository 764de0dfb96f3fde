"""The concerns that need more than requests: waiting, server health, and lanes in use."""

import asyncio
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn
from urllib.parse import quote

import msgspec

from flowfabric.core.contracts import flows
from flowfabric.core.contracts.leases import ClaimGrant, NoWork
from flowfabric.core.errors import NotFoundError, TransportError, UnavailableError
from flowfabric.core.ids import validate_lane, validate_namespaces, validate_worker_id
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api import check
from flowfabric.engine.api.events import Events
from flowfabric.engine.api.flows import tag_of
from flowfabric.engine.api.meta import Capabilities
from flowfabric.engine.api.places import Doorbell, Lanes, Wakeups, WorkPlace
from flowfabric.engine.events.flow_waits import wait_flow
from flowfabric.engine.http.link import HttpLink
from flowfabric.engine.http.proxies import proxied

_LEARN_AGAIN_S: Final = 10.0
_READY_PAUSE_S: Final = 0.2

# Made at run time, so type checkers only know that they are classes.
_Meta: Any = proxied("meta")
_Places: Any = proxied("places")
_Flows: Any = proxied("flows")
_Claims: Any = proxied("claims")


class HttpMeta(_Meta):
    """The server's health. Capabilities are those at the time of connecting."""

    def __init__(self, link: HttpLink, known: Capabilities) -> None:
        self._link = link
        self._known: Capabilities = known

    def leave_only(self, supports: Mapping[str, bool]) -> None:
        """Drop capabilities that clients of a server do not have."""
        both = {name: on and supports[name] for name, on in self._known.supports.items()}
        self._known = msgspec.structs.replace(self._known, supports=both)

    async def log_findings(self) -> None:
        """Do nothing: the server logs its findings itself."""

    async def failing_checks(self) -> list[str]:
        try:
            await self._link.call("GET", "/readyz")
        except UnavailableError as error:
            return error.detail.split(", ")
        return []

    async def wait_ready(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while True:
            try:
                return await self.ping()
            except TransportError as error:
                if not error.retryable or time.monotonic() > until:
                    raise
            await asyncio.sleep(_READY_PAUSE_S)

    def capabilities(self) -> Capabilities:
        return self._known

    def backend_label(self) -> str:
        return self._known.identity.family

    def fail_fast(self, *, enabled: bool = True) -> None:
        self._link.fails_fast = enabled


class HttpPlaces(_Places):
    """Lanes in use; the server registers them for its clients."""

    def __init__(self, link: HttpLink, lanes: Lanes) -> None:
        self._link = link
        self._lanes = lanes
        self.known_places: dict[str, set[str]] = {}
        self.known_namespaces: set[str] = set()
        self._shards: dict[str, tuple[int, float]] = {}

    async def learn_lane(self, lane_id: str) -> None:
        validate_lane(check.text(lane_id, "lane_id"))
        if time.monotonic() < self._shards.get(lane_id, (1, 0.0))[1]:
            return
        (found,) = await self._lanes.read_settings([lane_id])
        shards = found.shards if found.placement == "spread" else 1
        self._shards[lane_id] = shards, time.monotonic() + _LEARN_AGAIN_S

    def shards(self, lane_id: str) -> int:
        return self._shards.get(lane_id, (1, 0.0))[0]

    async def register_again(self) -> None:
        """Do nothing: the server registers them."""


class HttpClaims(_Claims):
    """Claims; the server's scheduler finds work for a worker."""

    def __init__(self, link: HttpLink) -> None:
        self._link = link

    async def claim_for_worker(
        self,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        *,
        worker_capabilities: Iterable[str] = (),
        worker_tasks: Iterable[str] = (),
        grant_ttl_ms: int = 5_000,
        namespaces: Iterable[str] | None = None,
    ) -> ClaimGrant | NoWork:
        """Have the server reserve one waiting execution of a lane for a worker.

        The server serves one namespace per request, or all. Several are asked in random order.
        """
        spaces = (None,) if namespaces is None else validate_namespaces(namespaces)
        path = f"/v1/workers/{quote(validate_worker_id(worker_id), safe='')}/claim"
        for namespace in random.sample(spaces, len(spaces)):
            body = {
                "lane_id": lane_id,
                "worker_instance_id": worker_instance_id,
                "grant_ttl_ms": grant_ttl_ms,
                "capabilities": list(worker_capabilities),
                "tasks": list(worker_tasks),
                "namespace": namespace,
            }
            grant = await self._link.call(
                "POST", path, body, answer=ClaimGrant, op="claim_for_worker"
            )
            if grant is not None:
                return grant
        return NoWork()


class HttpFlows(_Flows):
    """Flows; waiting for one reads the event feed."""

    def __init__(self, link: HttpLink, counts: PartitionCounts, events: Events) -> None:
        self._link = link
        self._counts = counts
        self._events = events

    async def wait_flow(self, flow_id: str, timeout: float | None = None) -> flows.FlowState:
        async def finished_state() -> flows.FlowState | None:
            found = await self.describe_flow(flow_id, edge_groups=False)
            if found is None:
                raise NotFoundError("flow_not_found", flow_id, op="wait_flow")
            return None if found.finished_at is None else found.derived_state

        tag = tag_of(flow_id, self._counts)
        return await wait_flow(self._events, tag, flow_id, finished_state, timeout)


class HttpWakeups(Wakeups):
    """Doorbells, which only exist next to the store."""

    def listen(self, lanes: Iterable[str]) -> Doorbell:  # noqa: ARG002
        _refuse("listen")

    async def find_work(
        self,
        places: Sequence[WorkPlace],  # noqa: ARG002
        likely: int = 1,  # noqa: ARG002
    ) -> list[WorkPlace]:
        _refuse("find_work")

    async def ring_waiting(self, lanes: Mapping[str, Sequence[str]]) -> int:  # noqa: ARG002
        _refuse("ring_waiting")


def _refuse(op: str) -> NoReturn:
    raise UnavailableError("unavailable", op, op=op)
