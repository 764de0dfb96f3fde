"""Claims for remote workers: long polls, disconnected clients, and repeated requests."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts.leases import Claim
from flowfabric.core.contracts.remote import RemoteClaim, RemoteClaims
from flowfabric.core.contracts.suspension import ResumeSignal
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import (
    new_uuid,
    validate_lanes,
    validate_namespace,
    validate_namespaces,
    validate_worker_id,
)
from flowfabric.engine.api import check
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import BATCH
from flowfabric.scheduler.claim_desk import ClaimDesk, DeskClaims
from flowfabric.server.auth import ApiCaller
from flowfabric.server.bodies import U32, U64, Uuid
from flowfabric.server.exchange import ClientGone, Request
from flowfabric.server.problems import Problem, invalid
from flowfabric.server.remote_fleet import RemoteFleet, RemoteWorker
from flowfabric.server.remote_turns import RemoteTurns, Turn

log = logging.getLogger(__name__)

LEAST_TTL_MS = 1_000
MOST_TTL_MS = 86_400_000
_DEFAULT_TTL_MS = 30_000
_DRAIN_PAUSE_S = 1.0
"""The minimum wait of a long poll by a drained worker."""
_NOTHING = DeskClaims([])
RequestKey = tuple[str, str, str]
"""The token, the instance and the id of a request."""


class RemoteClaimBody(msgspec.Struct, frozen=True, kw_only=True):
    """Which worker asks for work, what it offers, and how much it takes."""

    worker_instance_id: str
    worker_id: str | None = None
    """The pool that the worker belongs to; by default, the instance is a pool of its own."""
    namespace: str | None = None
    namespaces: list[str] = []
    """The namespaces to serve: by default only its own; `["*"]` means all that the token allows."""
    lanes: tuple[str, ...] = ("default",)
    capabilities: list[str] = []
    tasks: list[str] = []
    """The tasks that the worker knows."""
    other_tasks: bool | None = None
    """Whether the worker also takes tasks not in `tasks`; by default, only if `tasks` is empty."""
    max: U32 | None = None
    """How many executions to claim, by default 1; with 0, the call only shows that the worker is
    alive and returns what an earlier request with this id claimed."""
    lease_ttl_ms: U64 | None = None
    """How long a lease lasts without a renewal; 30 s by default."""
    request_id: Uuid | None = None
    """Send it again after a lost response to get the same claims."""
    starting: bool | None = None
    """The worker has just started: refuse it if another worker with this instance id is alive."""
    leaving: bool | None = None
    """The worker is stopping: remove it from the list, and claim nothing."""

    @property
    def most(self) -> int:
        """How many executions the worker takes."""
        return 1 if self.max is None else self.max

    @property
    def home(self) -> str:
        """The namespace of the worker itself."""
        return "default" if self.namespace is None else self.namespace

    def worker(self, caller: ApiCaller) -> RemoteWorker:
        """The worker, if it may serve what it asks for."""
        validate_worker_id(self.worker_instance_id, "worker_instance_id")
        check.whole(self.most, "max", 0, BATCH)
        ttl_ms = _DEFAULT_TTL_MS if self.lease_ttl_ms is None else self.lease_ttl_ms
        check.whole(ttl_ms, "lease_ttl_ms", LEAST_TTL_MS, MOST_TTL_MS)
        if not self.lanes:
            raise invalid("lanes", "must name at least one")
        others = self.other_tasks
        return RemoteWorker(
            worker_id=self.worker_instance_id if self.worker_id is None else self.worker_id,
            worker_instance_id=self.worker_instance_id,
            lanes=validate_lanes(list(dict.fromkeys(self.lanes))),
            capabilities=caps.normalise(self.capabilities, "worker"),
            tasks=tuple(sorted(set(check.texts(self.tasks, "tasks")))),
            takes_other_tasks=not self.tasks if others is None else others,
            namespace=validate_namespace(self.home),
            namespaces=self._served(caller),
            lease_ttl_ms=ttl_ms,
        )

    def _served(self, caller: ApiCaller) -> tuple[str, ...]:
        asked = tuple(self.namespaces) or (self.home,)
        all_of_them = "*" in asked
        for namespace in (self.home, *(() if all_of_them else validate_namespaces(asked))):
            if not caller.sees(namespace):
                raise Problem("forbidden", f"this token may not use namespace {namespace!r}")
        if all_of_them:
            return ("*",) if caller.namespaces is None else tuple(sorted(caller.namespaces))
        return asked


def _requests(worker: RemoteWorker) -> dict[str, ClaimRequest]:
    offered = caps.offered_csv(
        worker.capabilities, worker.tasks, no_others=not worker.takes_other_tasks
    )
    return {
        lane: ClaimRequest(
            lane,
            worker.worker_id,
            worker.worker_instance_id,
            offered,
            worker.lease_ttl_ms,
            None if "*" in worker.namespaces else worker.namespaces,
        )
        for lane in worker.lanes
    }


class _Claiming:
    """A claim in progress. A repeat of its request joins it."""

    def __init__(self) -> None:
        self.clients = 0
        self.given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when every client has disconnected."""
        self.turn: Turn | None = None
        """Of a request with an id."""
        self.task: asyncio.Task[DeskClaims]


class RemoteDesk:
    """Serves the claims of remote workers."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.desk = ClaimDesk(backend)
        self.fleet = RemoteFleet(backend)
        self._turns = RemoteTurns(backend)
        self._under_way: dict[RequestKey, _Claiming] = {}

    async def claim(
        self, body: RemoteClaimBody, caller: ApiCaller, request: Request, wait_ms: int = 0
    ) -> RemoteClaims:
        """Claim for the worker that sent a request, or repeat the answer to an earlier one."""
        worker = body.worker(caller)
        requests = _requests(worker)
        if body.leaving:
            await self.fleet.leaves(worker)
            return RemoteClaims([])
        draining = False
        if body.starting:
            await self.fleet.starts(worker, body.request_id)
        if body.most:
            await self.fleet.claims(worker)
        else:
            draining = await self.fleet.beats(worker)
        key = caller.token_id, worker.worker_instance_id, body.request_id or new_uuid()
        claiming = self._under_way.get(key)
        if claiming is None:
            claiming = self._under_way[key] = _Claiming()
            work = self._run(key, requests, body, wait_ms / 1000, claiming)
            claiming.task = asyncio.create_task(work, name="ff-remote-claim")
        found = await self._await(claiming, request)
        claims = [
            RemoteClaim.of(claim)
            if claim.resume_cause is None
            else RemoteClaim.of(claim, await self._signals(claim))
            for claim in found.claims
        ]
        waited_ms = math.floor(found.waited_s * 1000)
        return RemoteClaims(claims, draining or found.draining, found.unknown_tasks, waited_ms)

    async def _signals(self, claim: Claim) -> list[ResumeSignal]:
        """The signals that resumed an attempt; none if they cannot be read now."""
        try:
            return await self._backend.waitpoints.observe_signals(claim.handle)
        except EngineError as error:
            log.debug("cannot read the signals of %s: %s", claim.execution_id, error)
            return []

    async def _await(self, claiming: _Claiming, request: Request) -> DeskClaims:
        """What was claimed, unless the client disconnects before it is answered."""
        gone = asyncio.ensure_future(request.disconnected())
        task = claiming.task
        claiming.clients += 1
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientGone
            return task.result()
        finally:
            gone.cancel()
            claiming.clients -= 1
            if not claiming.clients:
                if not task.done():
                    claiming.given_up.set_result(None)
                elif gone.done() and not gone.cancelled() and task.exception() is None:
                    await self._turns.release(claiming.turn, task.result().claims)

    async def _run(
        self,
        key: RequestKey,
        requests: Mapping[str, ClaimRequest],
        body: RemoteClaimBody,
        wait_s: float,
        claiming: _Claiming,
    ) -> DeskClaims:
        try:
            earlier, new_id = await self._earlier(key, requests, body, wait_s, claiming)
            if earlier or not body.most:
                return await self._again(earlier)
            given_up = claiming.given_up
            found = await self.desk.claim(requests, body.most, wait_s, given_up, new_id)
            if found.draining and not found.claims and wait_s:
                await asyncio.wait((given_up,), timeout=min(wait_s, _DRAIN_PAUSE_S))
            if given_up.done():
                await self._turns.release(claiming.turn, found.claims)
                return _NOTHING
            return found
        finally:
            del self._under_way[key]

    async def _earlier(
        self,
        key: RequestKey,
        requests: Mapping[str, ClaimRequest],
        body: RemoteClaimBody,
        wait_s: float,
        claiming: _Claiming,
    ) -> tuple[list[Claim], Callable[[], str]]:
        """What earlier requests with this id claimed, and the ids of the calls for this one."""
        if body.request_id is None:
            return [], new_uuid
        name = "remote:{}:{}:{}".format(*key)
        if not body.most:
            return await self._turns.look(name, requests), new_uuid
        ttl_ms = next(iter(requests.values())).lease_ttl_ms + round(wait_s * 1000)
        claiming.turn, earlier = await self._turns.take(name, ttl_ms, requests)
        return earlier, claiming.turn.new_request_id

    async def _again(self, claims: list[Claim]) -> DeskClaims:
        """The answer to a request that claims nothing more."""
        if not claims:
            return _NOTHING
        began = min(claim.lease_expires_at - claim.handle.lease_ttl_ms for claim in claims)
        now = await self._backend.meta.server_time_ms()
        return DeskClaims(claims, waited_s=(began - now) / 1000)

    async def aclose(self) -> None:
        """Answer every long poll, without a claim."""
        await self.desk.aclose()
        await self.fleet.aclose()
