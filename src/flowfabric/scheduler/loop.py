"""Runs claim cycles while a worker serves: asleep without permits or hints, awake at a ring."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from flowfabric.core.errors import AuthError, EngineError, TransportError
from flowfabric.engine.api.wakeups import WorkPlace
from flowfabric.scheduler.claims import WorkerClaims
from flowfabric.scheduler.hints import LaneHints

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 5.0
_LAST_LISTEN_PAUSE_S = 1.0
_OUTAGES = frozenset({"transport", "busy_loading", "cluster"})


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
        pause = _FIRST_PAUSE_S
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
                pause = _FIRST_PAUSE_S
            except EngineError as error:
                if is_permanent(error):
                    raise
                extra = {"action": "claim_failed"}
                log.warning("claim failed, trying again: %s", error, extra=extra)
                await self._pause(error, pause * random.uniform(0.5, 1.0))  # noqa: S311
                pause = min(pause * 2, _LAST_PAUSE_S)

    async def _claim(self, lane: LaneHints, tag: str) -> None:
        tasks, more = await self._claims.claim_at(lane.lane_id, tag, self._batch)
        lane.visited(tag, more=more)
        for task in tasks:
            self._start(task)
        if not tasks and not more:
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
        await asyncio.sleep(_FIRST_PAUSE_S)
        try:
            await self._backend.meta.wait_ready(seconds)
        except EngineError:
            await asyncio.sleep(seconds)

    async def _listen(self) -> None:
        """Turn rings into hints while permits are free."""
        pause = _FIRST_PAUSE_S
        while True:
            await self._rings_wanted.wait()
            self._rings_wanted.clear()
            self._listening = True
            try:
                places = await self._doorbell.wait(self._listen_s)
                pause = _FIRST_PAUSE_S
                if not self._doorbell.heard_by_all:
                    self._rung.update(places)
                places = places or await self._sweep()
            except EngineError as error:
                log.debug("doorbell lost: %s", error)
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
                log.debug("doorbell not looked at: %s", error)
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
            log.debug("ring not passed on: %s", error)
            return False


def is_permanent(error: EngineError) -> bool:
    """Whether the login is wrong, so that no retry helps."""
    return isinstance(error, AuthError) or (
        isinstance(error, TransportError) and error.kind == "auth"
    )
