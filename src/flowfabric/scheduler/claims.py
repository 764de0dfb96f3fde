"""Leases for the handlers of this process, within its permits, and the loop that claims them."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts.leases import Claim, ClaimedMany, Handle
from flowfabric.core.errors import AuthError, EngineError, TransportError, WorkerAtCapacity
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.api.places import WorkPlace
from flowfabric.engine.outage import Outage
from flowfabric.scheduler.hints import LaneHints, LaneRotation

log = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")

_MAX_STICKY = 16
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 1.0
_FIRST_LOOP_PAUSE_S = 0.05
_LAST_LOOP_PAUSE_S = 5.0
_LAST_LISTEN_PAUSE_S = 1.0
_OUTAGES = frozenset({"transport", "busy_loading", "cluster"})


async def give_back(backend: Backend, handles: Iterable[Handle], pause_s: float = 0.0) -> int:
    """Return leases, best effort: the others lapse. The result is how many were returned."""
    if pause_s:
        await asyncio.sleep(pause_s)
    calls = (backend.executions.delay(handle, 1) for handle in handles)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in failed:
        log.debug("could not release a lease: %s", error)
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
    tasks: Sequence[str] = ()
    """The tasks that this process knows; executions may wait for a worker that knows theirs."""
    no_others: bool = False
    """Whether tasks that this process does not know are left to workers that do."""
    outage: Outage = field(default_factory=Outage)

    def __post_init__(self) -> None:
        instance = next(iter(self.requests.values())).worker_instance_id
        self.lanes = LaneRotation(self.requests, self.backend.counts, instance)
        self.background: set[asyncio.Task[None]] = set()
        self._unanswered: dict[tuple[str, str], tuple[str, float]] = {}
        self._sticky = 0
        self._left_to_others: set[str] = set()

    def offer(self, capabilities: Iterable[str], tasks: Iterable[str], *, no_others: bool) -> None:
        """Set what the next claims offer."""
        self.tasks, self.no_others = tuple(tasks), no_others
        csv = caps.offered_csv(capabilities, self.tasks, no_others=no_others)
        self.requests = {
            lane: msgspec.structs.replace(request, capabilities=csv)
            for lane, request in self.requests.items()
        }

    def log_unknown(self, tasks: Iterable[str]) -> None:
        """Say, once per task, that this process leaves it to others."""
        for kind in tasks:
            if kind not in self._left_to_others:
                self._left_to_others.add(kind)
                text = 'This worker does not know task "%s". Its executions wait for one that does.'
                log.warning(text, kind, extra={"action": "task_unknown", "execution_kind": kind})

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
                    tasks += await self._visit(lane, wanted - len(tasks))
        except EngineError:
            # What was claimed before the fault is not lost with it.
            if not tasks:
                raise
        return tasks

    async def _visit(self, lane: LaneHints, wanted: int) -> list[T]:
        while True:
            tasks = await lane.visit(list(lane.hinted), wanted, self.claim_at)
            # A visit may only have found work that it left to others.
            if tasks or not lane.hinted or not self.free:
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
            claims, request = self.backend.claims, self.requests[lane_id]
            if repeats:
                # The lost reply may have been that of a call that also completed.
                _, claimed = await claims.complete_and_claim(
                    tag, (), request, reserved, request_id=request_id
                )
            else:
                claimed = await claims.claim_many(request, tag, reserved, request_id=request_id)
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
        self.log_unknown(claimed.unknown_tasks)
        # Work remains but none was claimable by this worker: wait for a ring or the next sweep.
        # A repeat only returned what it returned before.
        return tasks, claimed.worth_repeating or (repeats and claimed.remaining > 0)

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
        self,
        lane_id: str,
        tag: str,
        items: Sequence[Completion],
        may_repeat: Callable[[], bool],
        *,
        of_flow: bool = False,
    ) -> tuple[list[EngineError | None], Callable[[], list[T]]]:
        """Complete executions and claim as many of the same lane and partition.

        Members of a flow release others there. Repeats the same request after an outage as long as
        `may_repeat`. Returns the errors, and a function that returns the claimed tasks: call it
        when the completed ones have released their permits.
        """
        request, request_id, since = self.requests[lane_id], new_uuid(), time.monotonic()
        # Completing these tasks frees their permits, so claim that many.
        room = len(items) if self._may_stick(lane_id, tag, of_flow=of_flow) else 0
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
                if not self.outage.noticed(error, "cannot store results"):
                    extra = {"action": "complete_delayed"}
                    log.warning("cannot store results, trying again: %s", error, extra=extra)
            else:
                self.outage.ended()
                if not room:
                    return outcomes, list
                return outcomes, partial(self._adopt_claimed, lane_id, tag, claimed, since)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(pause * 2, _LAST_PAUSE_S)

    def _adopt_claimed(self, lane_id: str, tag: str, claimed: ClaimedMany, since: float) -> list[T]:
        claims = claimed.claims
        self.log_unknown(claimed.unknown_tasks)
        # As in `claim_at`: what remains is not claimable by this worker.
        if claimed.worth_repeating:
            self.lanes[lane_id].add(tag)
        else:
            self.lanes[lane_id].visited(tag, more=False)
        room = 0 if self.stopping else self.reserve(len(claims))
        if len(claims) > room:
            unused = [claim.handle for claim in claims[room:]]
            self.in_background(give_back(self.backend, unused))
        return [self.adopt(claim, since) for claim in claims[:room]]

    def _may_stick(self, lane_id: str, tag: str, *, of_flow: bool) -> bool:
        """Stay on a partition for a while only, and not while others wait longer."""
        here = self.lanes[lane_id]
        known = tag in here.hinted
        if self.stopping or not (of_flow or known):
            return False
        if of_flow and self.free:
            return True
        if all(len(lane.hinted) <= (lane is here and known) for lane in self.lanes):
            return True
        self._sticky += 1
        if self._sticky < _MAX_STICKY:
            return of_flow or here.oldest() == tag
        self._sticky = 0
        return False


class ClaimLoop(Generic[T]):
    """Claims as long as permits are free and partitions are hinted, and starts what it claims.

    With free permits and no hints it listens to the doorbell, and sweeps when that stays silent.
    A busy worker hears no ring, so it looks around once per poll interval.
    """

    def __init__(
        self, claims: WorkerClaims[T], start: Callable[[T], None], *, batch: int, listen_s: float
    ) -> None:
        self._backend = claims.backend
        self._claims = claims
        self._lanes = claims.lanes
        self._start = start
        self._batch = batch
        self._listen_s = listen_s
        self._doorbell = claims.backend.wakeups.listen(lane.lane_id for lane in claims.lanes)
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()
        self._rings_wanted = asyncio.Event()
        self._listening = False
        self._rung: set[WorkPlace] = set()
        self._passed: dict[WorkPlace, float] = {}
        claims.on_release = self._wake.set

    def stop(self) -> None:
        """Claim nothing more; a claim under way is still started."""
        self._claims.stopping = True
        self._stopped.set()
        self._wake.set()

    async def run(self) -> None:
        """Serve until `stop`. Only an error that no retry can cure ends it otherwise."""
        self._claims.stopping = self._stopped.is_set()
        parts = [asyncio.create_task(p()) for p in (self._serve, self._listen, self._look)]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.wait(parts)
            await self._doorbell.aclose()

    async def _serve(self) -> None:
        for lane in self._lanes:
            lane.add(lane.home)
        pause, outage = _FIRST_LOOP_PAUSE_S, self._claims.outage
        while not self._stopped.is_set():
            found = self._lanes.next() if self._claims.free else None
            if found is None:
                self._wake.clear()
                if self._claims.free:
                    self._rings_wanted.set()
                await self._wake.wait()
                continue
            try:
                await self._claim(*found)
                pause = _FIRST_LOOP_PAUSE_S
                outage.ended()
            except EngineError as error:
                if is_permanent(error):
                    raise
                if not outage.noticed(error, "claim failed"):
                    extra = {"action": "claim_failed"}
                    log.warning("claim failed, trying again: %s", error, extra=extra)
                await self._pause(error, pause * random.uniform(0.5, 1.0))  # noqa: S311
                pause = min(pause * 2, _LAST_LOOP_PAUSE_S)

    async def _claim(self, lane: LaneHints, tag: str) -> None:
        tasks = await lane.visit([tag], self._batch, self._claims.claim_at)
        for task in tasks:
            self._start(task)
        if not tasks and tag not in lane.hinted:
            await self._pass_on((lane.lane_id, tag))

    async def _pause(self, error: EngineError, seconds: float) -> None:
        """Wait, but no longer than until the server is back or the loop is stopped."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._stopped.wait())]
        if isinstance(error, TransportError) and error.kind in _OUTAGES:
            waits.append(asyncio.ensure_future(self._until_up(seconds)))
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _until_up(self, seconds: float) -> None:
        await asyncio.sleep(_FIRST_LOOP_PAUSE_S)
        try:
            await self._backend.meta.wait_ready(seconds)
        except EngineError:
            await asyncio.sleep(seconds)

    async def _listen(self) -> None:
        """Turn rings into hints while permits are free."""
        pause = _FIRST_LOOP_PAUSE_S
        while True:
            await self._rings_wanted.wait()
            self._rings_wanted.clear()
            self._listening = True
            self._doorbell.hear(self._claims.tasks)
            try:
                places = await self._doorbell.wait(self._listen_s)
                pause = _FIRST_LOOP_PAUSE_S
                if not self._doorbell.heard_by_all:
                    self._rung.update(places)
                places = places or await self._sweep()
            except EngineError as error:
                log.debug("lost the connection of the doorbell: %s", error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LAST_LISTEN_PAUSE_S)
                places = [(lane.lane_id, lane.home) for lane in self._lanes]
            for lane_id, tag in places:
                if self._claims.free and not self._stopped.is_set():
                    self._lanes[lane_id].add(tag)
                else:
                    await self._ring_again((lane_id, tag))
            self._listening = False
            self._wake.set()

    async def _look(self) -> None:
        """Without this, a partition that keeps the worker busy would hide all others."""
        released = 0
        while True:
            await asyncio.sleep(self._claims.poll_s)
            before, released = released, self._claims.released
            if self._listening or before == released:
                continue
            try:
                places = [*await self._sweep(), *await self._doorbell.peek()]
            except EngineError as error:
                log.debug("could not check the doorbell: %s", error)
                continue
            for lane_id, tag in places:
                self._lanes[lane_id].add(tag)
            self._wake.set()

    async def _sweep(self) -> list[WorkPlace]:
        return [
            (lane.lane_id, tag) for lane in self._lanes for tag in await lane.sweep(self._backend)
        ]

    async def _pass_on(self, place: WorkPlace) -> None:
        """Let another worker hear a ring that led to nothing, once per interval.

        A worker that hears it again within that time keeps it, so a ring for work that nobody can
        take goes round the idle workers once and ends.
        """
        if place not in self._rung:
            return
        self._rung.discard(place)
        now = time.monotonic()
        due = now - self._passed.get(place, -math.inf) >= self._listen_s
        if due and await self._ring_again(place):
            self._passed[place] = now

    async def _ring_again(self, place: WorkPlace) -> bool:
        """Ring for another worker, after the rings that wait already; whether work waits there."""
        if self._doorbell.heard_by_all:
            return False
        self._rung.discard(place)
        lane_id, tag = place
        try:
            return await self._backend.wakeups.ring_waiting({tag: [lane_id]}) > 0
        except EngineError as error:
            log.debug("could not pass on a ring: %s", error)
            return False


def is_permanent(error: EngineError) -> bool:
    """Whether the login is wrong, so that no retry helps."""
    return isinstance(error, AuthError) or (
        isinstance(error, TransportError) and error.kind == "auth"
    )
