"""Leases for the handlers of this process, within its permits, and the loop that claims them."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from flowfabric.core.backoff import Backoff
from flowfabric.core.contracts.leases import Candidate, ClaimedMany
from flowfabric.core.errors import EngineError, TransportError
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import End, EndOutcome
from flowfabric.engine.api.places import WorkPlace
from flowfabric.engine.outage import Outage
from flowfabric.scheduler.admission import Admissions
from flowfabric.scheduler.cycles import measure_cycle, measured
from flowfabric.scheduler.giving_back import give_back
from flowfabric.scheduler.hints import LaneHints, LaneRotation, sweep
from flowfabric.scheduler.permits import ClaimPermits
from flowfabric.scheduler.visits import Visits

log = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")

_MAX_STICKY = 16
_PAUSES_S = (0.1, 1.0)


class SharedHints(NamedTuple):
    """Where work is believed to wait, and the admissions of the process that claims it."""

    lanes: LaneRotation
    admissions: Admissions
    visits: Visits | None = None
    """In a cluster: the visits of all who share this."""


@dataclass(eq=False)
class _PermitHold:
    """Permits that a claim under way reserved."""

    place: WorkPlace
    permits: int
    lent: bool = False


@dataclass(eq=False, repr=False)
class WorkerClaims(ClaimPermits[T]):
    """Claims of one worker process from the store."""

    shared: SharedHints | None = None
    """What a server's claims for workers share; None if a worker claims for itself."""
    weights: Mapping[str, int] | None = None
    """How many turns a lane gets; one if it is not listed."""
    new_request_id: Callable[[], str] = new_uuid
    """Makes the id of each call that claims."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shared = self.shared
        if shared is None:
            instance = next(iter(self.requests.values())).worker_instance_id
            lanes = LaneRotation(self.requests, self.backend.counts, instance, self.weights)
            shared = SharedHints(lanes, Admissions(self.backend))
        self.lanes, self.admissions, self._visits = shared
        self._slow: list[asyncio.Task[list[T]]] = []
        self._answered = False
        self._unanswered: dict[WorkPlace, list[tuple[str, float]]] = {}
        """Requests that may have claimed something, and since when, by lane and partition."""
        self.claim_from = (
            self.claim_at if self.meter is None else measured(self.claim_at, self.meter)
        )
        """`claim_at`, measured if metrics are on."""
        self._needing: dict[WorkPlace, Sequence[Candidate]] = {}
        # Where candidates need admission, and where a claim is under way.
        self._limited: set[WorkPlace] = set()
        self._claiming: set[WorkPlace] = set()
        self._holds: set[_PermitHold] = set()
        self._fault: EngineError | None = None

    async def claim_many(self, wanted: int) -> list[T]:
        """Claim up to `wanted` executions of all lanes; empty without work or permits."""
        wanted = 0 if self.draining else min(wanted, self.free)
        self._fault = None
        if tasks := self._arrived():
            return tasks
        try:
            for lane in self.lanes.in_turn():
                if len(tasks) < wanted:
                    await self._sweep_when_due(lane)
                    tasks += await self._visit(lane, wanted - len(tasks))
        except EngineError:
            # The fault must not lose what was claimed before it.
            if not tasks:
                raise
        if self._fault is not None and not tasks and self._visits is None:
            raise self._fault
        return tasks

    async def claim_when_rung(self, wanted: int, seconds: float) -> list[T]:
        """`claim_many` that waits for work."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + seconds
        bell = self.backend.wakeups.listen(self.requests)
        bell.hear(self.offered)
        try:
            while self.free and (left := ends_at - loop.time()) > 0:
                # Rings may be lost, so it also looks now and then.
                pause = min(left, self.poll_s)
                if self.draining:
                    await asyncio.sleep(pause)
                    continue
                places = await bell.wait(pause)
                for lane_id, tag in places:
                    self.lanes[lane_id].add(tag)
                if tasks := await self.claim_many(wanted):
                    return tasks
                if self.draining:
                    # The ring that told it so is for another worker.
                    for lane_id, tag in places:
                        await self.backend.wakeups.ring_waiting({tag: [lane_id]})
        finally:
            await bell.aclose()
        return []

    @property
    def slow(self) -> Sequence[asyncio.Future[Any]]:
        """The visits that `claim_many` did not wait for; call it again when one is done."""
        return self._slow

    def answer(self) -> list[T]:
        """Claim nothing more; returns what slow visits claimed. What they still claim goes back."""
        self._answered, self.free = True, 0
        return self._arrived()

    def _arrived(self) -> list[T]:
        """What slow visits claimed."""
        done = [visit for visit in self._slow if visit.done()]
        self._slow = [visit for visit in self._slow if visit not in done]
        kept = (visit for visit in done if not visit.cancelled() and visit.exception() is None)
        return [task for visit in kept for task in visit.result()]

    async def _visit(self, lane: LaneHints, wanted: int) -> list[T]:
        while True:
            if self._visits is None:
                tasks = await lane.visit(list(lane.hinted), wanted, self.claim_from)
            else:
                tasks = await self._visit_each(lane, wanted, self._visits)
            # A visit may only have found work that it left to others.
            if tasks or not lane.hinted or not self.free:
                return tasks

    async def _visit_each(self, lane: LaneHints, wanted: int, visits: Visits) -> list[T]:
        """Visit the hinted partitions, but let no server that is slow or away hold up the others.

        One visit at a time goes to a partition, and hints at it again when it ends.
        """
        tasks: list[T] = []
        for tag in list(lane.hinted):
            if len(tasks) >= wanted:
                break
            place = lane.lane_id, tag
            if place in visits:
                lane.claimed(tag, more=False)
                continue
            visit = await visits.begin(place, self._claim_at_last(lane, tag, wanted - len(tasks)))
            if visit.done():
                tasks += visit.result()
            else:
                self.lend(place)
                lane.claimed(tag, more=False)
                self._slow.append(visit)
        return tasks

    async def _claim_at_last(self, lane: LaneHints, tag: str, wanted: int) -> list[T]:
        """A visit that repeats what may have claimed something when its server is back."""
        backoff, ttl_ms = Backoff(*_PAUSES_S), self.requests[lane.lane_id].lease_ttl_ms
        lapses_at = time.monotonic() + ttl_ms / 1000
        while True:
            try:
                return await lane.visit([tag], wanted, self.claim_from)
            except EngineError as error:
                if not Outage.causes(error):
                    raise
                log.debug("cannot claim from %s: %s", tag, error)
                await asyncio.sleep(backoff.jittered_s())
            unanswered = (lane.lane_id, tag) in self._unanswered
            if not unanswered or time.monotonic() >= lapses_at:
                lane.add(tag)
                return []

    async def _sweep_when_due(self, lane: LaneHints) -> None:
        if not lane.hinted or time.monotonic() - lane.swept_at >= self.poll_s:
            for _, tag in await sweep([lane], self.backend):
                lane.add(tag)

    async def claim_at(self, lane_id: str, tag: str, max_n: int) -> tuple[list[T], bool]:
        """Claim from one lane and partition; the tasks, and whether to ask again at once."""
        if self.draining:
            return [], False
        reserved = max_n if self._answered else self.reserve(max_n)
        if not reserved:
            return [], True
        request_id, since, repeats = self._request(lane_id, tag)
        tasks: list[T] = []
        hold = _PermitHold((lane_id, tag), 0 if self._answered else reserved)
        self._holds.add(hold)
        self._claiming.add((lane_id, tag))
        try:
            claims, request = self.backend.claims, self.requests[lane_id]
            needing = () if repeats else self._needing.pop((lane_id, tag), ())
            if needing:
                claimed = ClaimedMany([], 0, needing=needing[:reserved])
            elif repeats:
                # The lost reply may have been that of a call that also completed.
                _, claimed = await claims.complete_and_claim(
                    tag, (), request, reserved, request_id=request_id
                )
            else:
                claimed = await claims.claim_many(request, tag, reserved, request_id=request_id)
            again = self._note_limited((lane_id, tag), claimed)
            if again:
                again = await self._claim_admitted(request, tag, claimed, since)
            self._take_back(hold, len(claimed.claims))
            tasks = [self.adopt(claim, since) for claim in claimed.claims[: hold.permits]]
        except (TransportError, asyncio.CancelledError) as error:
            if not isinstance(error, TransportError) or error.ambiguous:
                self._note_unanswered(lane_id, tag, request_id, since)
            raise
        finally:
            self._claiming.discard((lane_id, tag))
            self._holds.discard(hold)
            self.free += hold.permits - len(tasks)
        if len(claimed.claims) > len(tasks):
            # The answer to an earlier or slow request, when more permits were free.
            await give_back(self.backend, [claim.handle for claim in claimed.claims[len(tasks) :]])
        if tasks:
            self.found_at(lane_id, tag)
        if claimed.draining:
            self.drain()
        self.log_unknown(claimed.unknown_tasks)
        # If work remains but none was claimable by this worker, wait for a ring or the next sweep.
        return tasks, again or claimed.worth_repeating or (lane_id, tag) in self._unanswered

    def lend(self, place: WorkPlace) -> None:
        """Free the permits of a claim that its server keeps waiting; it takes what is free then."""
        for hold in self._holds:
            if hold.place == place:
                self.free += hold.permits
                hold.permits, hold.lent = 0, True

    def _take_back(self, hold: _PermitHold, wanted: int) -> None:
        if hold.lent:
            hold.permits = self.reserve(wanted)

    def _note_limited(self, place: WorkPlace, claimed: ClaimedMany) -> bool:
        """Whether candidates of a place need admission."""
        if claimed.needing:
            self._limited.add(place)
        elif claimed.claims:
            self._limited.discard(place)
        return bool(claimed.needing)

    async def _claim_admitted(
        self, request: ClaimRequest, tag: str, claimed: ClaimedMany, since: float
    ) -> bool:
        """Add the admitted ones of those that need it to the claims; whether to look again."""
        request_id = self.new_request_id()
        try:
            admitted = await self.admissions.claim(request, tag, claimed.needing, request_id)
        except asyncio.CancelledError:
            self._note_unanswered(request.lane_id, tag, request_id, since)
            raise
        if admitted.unanswered:
            self._note_unanswered(request.lane_id, tag, request_id, since)
        claimed.claims.extend(admitted.claims)
        self._fault = admitted.fault or self._fault
        return bool(admitted.claims or admitted.held_back)

    def _request(self, lane_id: str, tag: str) -> tuple[str, float, bool]:
        """The id of the claim to make, when it was first made, and whether it is a repeat.

        A claim whose reply was lost is repeated, or its leases would lie idle.
        """
        now = time.monotonic()
        lost = self._unanswered.pop((lane_id, tag), [])
        oldest = now - self.requests[lane_id].lease_ttl_ms / 1000
        live = [each for each in lost if each[1] > oldest]
        if not live:
            return self.new_request_id(), now, False
        if len(live) > 1:
            self._unanswered[lane_id, tag] = live[1:]
        return *live[0], True

    def _note_unanswered(self, lane_id: str, tag: str, request_id: str, since: float) -> None:
        self._unanswered.setdefault((lane_id, tag), []).append((request_id, since))
        self.lanes[lane_id].add(tag)

    def found_at(self, lane_id: str, tag: str) -> None:
        """Have the scanners look where work was found."""
        if lane_id not in self.backend.places.known_places.get(tag, ()):
            self.in_background(self.backend.places.register_places, {tag: [lane_id]})

    async def complete(
        self,
        lane_id: str,
        tag: str,
        items: Sequence[End],
        may_repeat: Callable[[], bool],
        *,
        of_flow: bool = False,
    ) -> tuple[list[EndOutcome], Callable[[], list[T]]]:
        """Complete and fail executions, and claim as many of the same lane and partition.

        Members of a flow release others there. Repeats the same request after an outage as long as
        `may_repeat`. Returns the outcomes, and a function that returns the claimed tasks: call it
        when those that ended have released their permits.
        """
        request, request_id, since = self.requests[lane_id], self.new_request_id(), time.monotonic()
        # Ending these tasks frees their permits, so claim that many.
        room = len(items) if self._may_stick(lane_id, tag, of_flow=of_flow) else 0
        backoff: Backoff | None = None
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
                backoff = backoff or Backoff(*_PAUSES_S)
                await self.wait_to_store(error, backoff)
            else:
                self.outage.ended()
                if not room:
                    if of_flow:
                        # The members that these released wait there.
                        self.lanes[lane_id].add(tag)
                    return outcomes, list
                if self.meter is not None:
                    measure_cycle(self.meter, lane_id, since, claimed.claims)
                return outcomes, partial(self._adopt_claimed, lane_id, tag, claimed, since)

    def _adopt_claimed(self, lane_id: str, tag: str, claimed: ClaimedMany, since: float) -> list[T]:
        claims = claimed.claims
        if claimed.draining:
            self.drain()
        self.log_unknown(claimed.unknown_tasks)
        if self._note_limited((lane_id, tag), claimed):
            self._needing[lane_id, tag] = claimed.needing
        # As in `claim_at`: what remains is not claimable by this worker.
        self.lanes[lane_id].claimed(tag, more=claimed.worth_repeating or bool(claimed.needing))
        room = 0 if self.stopping else self.reserve(len(claims))
        if len(claims) > room:
            unused = [claim.handle for claim in claims[room:]]
            self.in_background(give_back, self.backend, unused)
        return [self.adopt(claim, since) for claim in claims[:room]]

    def _may_stick(self, lane_id: str, tag: str, *, of_flow: bool) -> bool:
        """Whether a completing call may also claim there; counts it if so (04 S3)."""
        here, place = self.lanes[lane_id], (lane_id, tag)
        if self.stopping or self.draining or not (of_flow or tag in here.hinted):
            return False
        if place in self._limited and (place in self._needing or place in self._claiming):
            # The best candidates there are about to be admitted: it would only find them again.
            return False
        # While permits are free, no hint waits: the loop follows them all. Without this, chains of
        # flows cost the server 30% more.
        if not self.free and here.oldest() not in (tag, None):
            return False
        count = here.sticky.get(tag, 0)
        if count >= _MAX_STICKY:
            if any(each != place for lane in self.lanes for each in lane.places()):
                return False
            # The visit that is due would come here, too: this call serves as one.
            count = 0
        here.sticky[tag] = count + 1
        return True

    async def aclose(self) -> None:
        """Stop the timers of admissions, and wait for what runs in the background."""
        await self.admissions.aclose()
        await super().aclose()
