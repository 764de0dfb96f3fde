"""Leases for the handlers of this process: within its permits, repeated when a reply is lost."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from flowfabric.core.contracts.leases import Claim, ClaimedMany, Handle
from flowfabric.core.errors import EngineError, TransportError, WorkerAtCapacity
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import Completion
from flowfabric.scheduler.hints import LaneHints, LaneRotation

log = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")

_MAX_STICKY = 16
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 1.0


async def give_back(backend: Backend, handles: Iterable[Handle]) -> int:
    """Return leases, best effort: the others lapse. The result is how many were returned."""
    calls = (backend.executions.delay(handle, 1) for handle in handles)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in failed:
        log.debug("lease not given back: %s", error)
    return len(outcomes) - len(failed)


@dataclass(eq=False, repr=False)
class WorkerClaims(Generic[T]):
    """Claims of one worker process.

    A permit is reserved before any storage call and stays with the task until `release`.
    """

    backend: Backend
    requests: Mapping[str, ClaimRequest]
    """What each lane is asked for."""
    adopt: Callable[[Claim, float], T]
    """Makes a task of a claim and of when it was asked for."""
    free: int
    """How many permits no task has."""
    poll_s: float
    released: int = 0
    """How many permits came back so far."""
    on_release: Callable[[], None] | None = None
    stopping: bool = False
    """Claim nothing more, and start nothing of what a completing call claims."""

    def __post_init__(self) -> None:
        instance = next(iter(self.requests.values())).worker_instance_id
        self.lanes = LaneRotation(self.requests, self.backend.counts, instance)
        self.background: set[asyncio.Task[None]] = set()
        self._unanswered: dict[tuple[str, str], tuple[str, float]] = {}
        self._sticky = 0

    def reserve(self, wanted: int) -> int:
        """Take up to `wanted` permits; how many were free."""
        taken = min(wanted, self.free)
        self.free -= taken
        return taken

    def release(self) -> None:
        """Return the permit of a task that ended."""
        self.free += 1
        self.released += 1
        if self.on_release is not None:
            self.on_release()

    async def claim_many(self, wanted: int) -> list[T]:
        """Claim up to `wanted` executions of all lanes; empty without work or permits."""
        wanted = min(wanted, self.free)
        tasks: list[T] = []
        try:
            for lane in self.lanes.in_turn():
                if len(tasks) < wanted:
                    await self._sweep_when_due(lane)
                    rest = wanted - len(tasks)
                    tasks += await lane.visit(list(lane.hinted), rest, self.claim_at)
        except EngineError:
            # What was claimed before the fault is not lost with it.
            if not tasks:
                raise
        return tasks

    async def _sweep_when_due(self, lane: LaneHints) -> None:
        if not lane.hinted or time.monotonic() - lane.swept_at >= self.poll_s:
            for tag in await lane.sweep(self.backend):
                lane.add(tag)

    async def claim_at(self, lane_id: str, tag: str, max_n: int) -> tuple[list[T], bool]:
        """Claim from one lane and partition; the tasks, and whether to ask again at once."""
        reserved = self.reserve(max_n)
        if not reserved:
            return [], True
        request_id, since, repeats = self._request(lane_id, tag)
        tasks: list[T] = []
        try:
            claimed = await self.backend.claims.claim_many(
                self.requests[lane_id], tag, reserved, request_id=request_id
            )
            tasks = [self.adopt(claim, since) for claim in claimed.claims[:reserved]]
        except (TransportError, asyncio.CancelledError) as error:
            if not isinstance(error, TransportError) or error.ambiguous:
                self._note_unanswered(lane_id, tag, request_id, since)
            raise
        finally:
            self.free += reserved - len(tasks)
        if len(claimed.claims) > reserved:
            # The answer to an earlier request, when more permits were free.
            await give_back(self.backend, [claim.handle for claim in claimed.claims[reserved:]])
        if tasks:
            self._register_place(lane_id, tag)
        # Work remains but none was claimable by this worker: wait for a ring or the next sweep.
        # A repeat only returned what it returned before.
        return tasks, claimed.remaining > 0 and (repeats or bool(claimed.claims))

    async def claim_with(self, consume: Callable[[], Awaitable[Claim | R]]) -> T | R:
        """Turn a grant into a task; an outcome that is no claim is returned as it is."""
        if not self.reserve(1):
            raise WorkerAtCapacity
        since, claimed = time.monotonic(), False
        try:
            outcome = await consume()
            if not isinstance(outcome, Claim):
                return outcome
            claimed = True
        finally:
            self.free += not claimed
        self._register_place(outcome.handle.lane_id, outcome.handle.execution_id.tag)
        return self.adopt(outcome, since)

    def _request(self, lane_id: str, tag: str) -> tuple[str, float, bool]:
        """The id of the claim to make, when it was first made, and whether it is a repeat.

        A claim whose reply was lost is repeated, or its leases would lie idle.
        """
        now = time.monotonic()
        lost = self._unanswered.pop((lane_id, tag), None)
        if lost is not None and now - lost[1] < self.requests[lane_id].lease_ttl_ms / 1000:
            return *lost, True
        return new_uuid(), now, False

    def _note_unanswered(self, lane_id: str, tag: str, request_id: str, since: float) -> None:
        self._unanswered[lane_id, tag] = request_id, since
        self.lanes[lane_id].add(tag)

    def _register_place(self, lane_id: str, tag: str) -> None:
        """Have the scanners look where work was found."""
        if lane_id not in self.backend.places.known_places.get(tag, ()):
            self.in_background(self.backend.places.register_places({tag: [lane_id]}))

    def in_background(self, work: Awaitable[object]) -> None:
        """Run what no caller waits for; a failure is logged at debug level."""

        async def run() -> None:
            try:
                await work
            except EngineError as error:
                log.debug("background call failed: %s", error)

        task = asyncio.get_running_loop().create_task(run())
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def complete(
        self, lane_id: str, tag: str, items: Sequence[Completion], may_repeat: Callable[[], bool]
    ) -> tuple[list[EngineError | None], Callable[[], list[T]]]:
        """Complete executions and claim as many of the same lane and partition.

        Repeats the same request after an outage as long as `may_repeat`. Returns the errors, and
        a function that returns the claimed tasks: call it when the completed ones have released
        their permits.
        """
        request, request_id, since = self.requests[lane_id], new_uuid(), time.monotonic()
        # Completing these tasks frees their permits, so claim that many.
        room = len(items) if self._may_stick(lane_id, tag) else 0
        pause = _FIRST_PAUSE_S
        while True:
            try:
                outcomes, claimed = await self.backend.claims.complete_and_claim(
                    tag, items, request, room, request_id=request_id
                )
            except TransportError as error:
                if not error.retryable or not may_repeat():
                    if room and error.ambiguous:
                        self._note_unanswered(lane_id, tag, request_id, since)
                    raise
                extra = {"action": "complete_delayed"}
                log.warning("results not stored, trying again: %s", error, extra=extra)
            else:
                if not room:
                    return outcomes, list
                return outcomes, partial(self._adopt_claimed, lane_id, tag, claimed, since)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(pause * 2, _LAST_PAUSE_S)

    def _adopt_claimed(self, lane_id: str, tag: str, claimed: ClaimedMany, since: float) -> list[T]:
        claims = claimed.claims
        # As in `claim_at`: what remains is not claimable by this worker.
        if not (claims and claimed.remaining):
            self.lanes[lane_id].visited(tag, more=False)
        room = 0 if self.stopping else self.reserve(len(claims))
        if len(claims) > room:
            unused = [claim.handle for claim in claims[room:]]
            self.in_background(give_back(self.backend, unused))
        return [self.adopt(claim, since) for claim in claims[:room]]

    def _may_stick(self, lane_id: str, tag: str) -> bool:
        """Stay on a partition for a while only, and not while others wait longer."""
        if self.stopping or tag not in self.lanes[lane_id].hinted:
            return False
        if all(len(lane.hinted) <= (lane.lane_id == lane_id) for lane in self.lanes):
            return True
        self._sticky += 1
        if self._sticky < _MAX_STICKY:
            return self.lanes[lane_id].oldest() == tag
        self._sticky = 0
        return False
