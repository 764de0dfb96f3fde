"""The loop in which a worker claims: hints first, then rings of the doorbell, then sweeps."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from flowfabric.core.backoff import Backoff
from flowfabric.core.errors import EngineError, TransportError
from flowfabric.engine.api.places import WorkPlace
from flowfabric.engine.outage import is_permanent
from flowfabric.scheduler.claims import WorkerClaims
from flowfabric.scheduler.hints import LaneHints, sweep
from flowfabric.scheduler.visits import Visits

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S = 0.05
_LAST_CLAIM_PAUSE_S = 5.0
_LAST_LISTEN_PAUSE_S = 1.0
_SWEPT_LANES = 2
_OUTAGES = frozenset({"transport", "busy_loading", "cluster"})


class ClaimLoop(Generic[T]):
    """Claims as long as permits are free and partitions are hinted, and starts what it claims.

    With free permits and no hints it listens to the doorbell, and sweeps when no ring comes.
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
        self._visits = Visits(self._returned)
        self._backoffs: dict[WorkPlace, Backoff] = {}
        """Where the last claim failed."""
        self._fatal: BaseException | None = None
        """The error of a visit that ends the loop."""
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
        self._lanes.hint_own(self._backend)
        try:
            while self._goes_on():
                found = self._lanes.next() if self._claims.free else None
                if found is None:
                    self._wake.clear()
                    if self._claims.free and not self._claims.draining:
                        self._rings_wanted.set()
                    elif self._claims.meter is not None:
                        self._claims.meter.count("ff_worker_at_capacity_total")
                    await self._wake.wait()
                    continue
                lane, tag = found
                if (lane.lane_id, tag) in self._visits:
                    # The visit under way hints at it again when it ends.
                    lane.claimed(tag, more=False)
                    continue
                await self._visit(lane, tag)
        except BaseException:
            self._visits.cancel()
            raise
        finally:
            # What they claim is still started.
            await self._visits.wait()

    def _goes_on(self) -> bool:
        if self._fatal is not None:
            raise self._fatal
        return not self._stopped.is_set()

    async def _visit(self, lane: LaneHints, tag: str) -> None:
        """Claim there, but let no partition whose server is slow or away hold up the others."""
        if not self._doorbell.many_servers:
            # Further claims would only add to what keeps the server busy.
            await self._claim(lane, tag)
            return
        place = lane.lane_id, tag
        visit = await self._visits.begin(place, self._claim(lane, tag))
        if not visit.done():
            self._claims.lend(place)
            lane.claimed(tag, more=False)

    def _returned(self, visit: asyncio.Task[None]) -> None:
        if not visit.cancelled():
            self._fatal = visit.exception() or self._fatal
        self._wake.set()

    async def _claim(self, lane: LaneHints, tag: str) -> None:
        place, outage = (lane.lane_id, tag), self._claims.outage
        try:
            tasks = await lane.visit([tag], self._batch, self._claims.claim_from)
        except EngineError as error:
            if is_permanent(error):
                raise
            if not outage.noticed(error, "claim failed"):
                extra = {"action": "claim_failed"}
                log.warning("claim failed, trying again: %s", error, extra=extra)
            backoff = self._backoffs.setdefault(place, Backoff(_FIRST_PAUSE_S, _LAST_CLAIM_PAUSE_S))
            await self._pause(error, backoff.jittered_s())
            lane.add(tag)
            return
        for task in tasks:
            self._start(task)
        self._backoffs.pop(place, None)
        if not self._backoffs:
            outage.ended()
        if not tasks and tag not in lane.hinted:
            await self._pass_on(place)

    async def _pause(self, error: EngineError, seconds: float) -> None:
        """Wait, but stop when the server is back or the loop is stopped."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._stopped.wait())]
        if isinstance(error, TransportError) and error.kind in _OUTAGES:
            waits.append(asyncio.ensure_future(self._until_up(seconds)))
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _until_up(self, seconds: float) -> None:
        await asyncio.sleep(_FIRST_PAUSE_S)
        try:
            await self._backend.meta.wait_ready(seconds)
        except EngineError:
            await asyncio.sleep(seconds)

    async def _listen(self) -> None:
        """Turn rings into hints while permits are free."""
        backoff = Backoff(_FIRST_PAUSE_S, _LAST_LISTEN_PAUSE_S)
        while True:
            await self._rings_wanted.wait()
            self._rings_wanted.clear()
            self._listening = True
            self._doorbell.hear(self._claims.offered)
            try:
                # Random, so that workers that started together do not keep sweeping together.
                spread = random.uniform(0.9, 1.1)  # noqa: S311
                places = await self._doorbell.wait(self._listen_s * spread)
                backoff.reset()
                self._rung.update(places)
                if not places:
                    lanes, width = self._lanes.some(_SWEPT_LANES), self._doorbell.sweep_width
                    places = await sweep(lanes, self._backend, width)
            except EngineError as error:
                log.debug("lost the doorbell connection: %s", error)
                await asyncio.sleep(backoff.jittered_s())
                self._lanes.hint_own(self._backend)
                places = []
            for lane_id, tag in places:
                if self._claims.free and not (self._stopped.is_set() or self._claims.draining):
                    self._lanes[lane_id].add(tag)
                else:
                    await self._ring_again((lane_id, tag))
            self._listening = False
            self._wake.set()

    async def _look(self) -> None:
        """Look elsewhere, too: a partition that keeps the worker busy would hide all others."""
        released = 0
        while True:
            await asyncio.sleep(self._claims.poll_s)
            before, released = released, self._claims.released
            if self._listening or before == released or self._claims.draining:
                continue
            try:
                places = [*await sweep(self._lanes, self._backend), *await self._doorbell.peek()]
            except EngineError as error:
                log.debug("could not check the doorbell: %s", error)
                continue
            for lane_id, tag in places:
                self._lanes[lane_id].add(tag)
            self._wake.set()

    async def _pass_on(self, place: WorkPlace) -> None:
        """Pass a ring that led to nothing to another worker, once per interval.

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
        self._rung.discard(place)
        lane_id, tag = place
        try:
            return await self._backend.wakeups.ring_waiting({tag: [lane_id]}) > 0
        except EngineError as error:
            log.debug("could not wake another worker: %s", error)
            return False
