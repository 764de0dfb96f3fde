"""Claims that a server makes for workers elsewhere, and the place where those workers wait.

Workers that offer the same share hints, one doorbell and one sweep, so a thousand idle workers cost
the deployment as much as one.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from flowfabric.core.backoff import Backoff
from flowfabric.core.capabilities import Offer
from flowfabric.core.contracts.leases import Claim
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.places import WorkPlace
from flowfabric.scheduler.admission import Admissions
from flowfabric.scheduler.claims import SharedHints, WorkerClaims
from flowfabric.scheduler.giving_back import give_back
from flowfabric.scheduler.hints import LaneRotation, sweep
from flowfabric.scheduler.visits import Visits

log = logging.getLogger(__name__)

_LISTEN_S = 2.0
"""The longest wait for a doorbell before a sweep."""
_IDLE_S = 60.0
"""How long hints and the doorbell are kept for workers that do not wait now."""
_PAUSES_S = (0.05, 1.0)
_PROMPT_S = 0.5
"""How long a claim that need not wait waits for a slow server if it found nothing elsewhere."""
_SWEPT_LANES = 2
_MOST_BELLS = 256
"""How many doorbells may be open; each has a connection. Workers with yet another offer sweep every
`_LISTEN_S`. As many offers are kept for workers that do not wait now."""

T = TypeVar("T")
OfferKey = tuple[tuple[str, ...], str, tuple[str, ...] | None]


class Look(NamedTuple, Generic[T]):
    """What one search for work found, if anything."""

    found: T
    is_last: bool = False
    """Whether there is nothing to wait for."""
    refused: bool = False
    """Whether the worker gets nothing, so that a ring is for another one."""
    slow: Sequence[asyncio.Future[Any]] = ()
    """Parts of the search that were not waited for: look again when one is done."""


class DeskClaims(msgspec.Struct, frozen=True):
    """What was claimed for a worker."""

    claims: list[Claim]
    draining: bool = False
    """An operator drains the worker: it gets nothing more."""
    unknown_tasks: Sequence[str] = ()
    """The tasks that the worker does not know and that were left to others."""
    waited_s: float = 0.0
    """How long after the request the claims were made, at least."""


class ClaimDesk:
    """Claims for workers elsewhere, and lets them wait for work."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._admissions = Admissions(backend)
        self._offers: dict[OfferKey, SharedOffer] = {}
        """Those used lately are last."""
        self._bells = Bells()
        self.closed = False

    @property
    def waiting(self) -> int:
        """How many claims wait for work."""
        return sum(len(offer.waiters) for offer in self._offers.values())

    async def claim(
        self,
        requests: Mapping[str, ClaimRequest],
        wanted: int,
        wait_s: float = 0.0,
        given_up: asyncio.Future[Any] | None = None,
        new_request_id: Callable[[], str] = new_uuid,
    ) -> DeskClaims:
        """Claim up to `wanted` executions; wait for the first one, at most `wait_s`.

        The wait also ends when `given_up` is done, and when the desk closes. The engine derives the
        ids of the leases from the request ids.
        """
        first, began = next(iter(requests.values())), time.monotonic()
        asked_at: list[float] = []

        def note(claim: Claim, since: float) -> Claim:
            asked_at.append(since)
            return claim

        offer = self.offer(
            *(requests, first.capabilities, first.namespaces, first.worker_instance_id)
        )
        shared = SharedHints(offer.lanes, self._admissions, offer.visits)
        claims = WorkerClaims(
            *(self._backend, requests, note, wanted, _LISTEN_S),
            quiet=True,
            shared=shared,
            new_request_id=new_request_id,
        )

        async def look() -> Look[list[Claim]]:
            found = await claims.claim_many(wanted)
            # Report a task that the worker does not know at once.
            is_last = bool(claims.draining or claims.left_to_others)
            return Look(found, is_last, claims.draining, claims.slow)

        try:
            found = await self.serve(offer, look, wait_s, given_up)
        finally:
            if late := claims.answer():
                handles = [claim.handle for claim in late]
                claims.in_background(give_back, self._backend, handles)
        unknown = tuple(sorted(claims.left_to_others))
        return DeskClaims(found, claims.draining, unknown, min(asked_at, default=began) - began)

    async def serve(
        self,
        offer: "SharedOffer",
        look: Callable[[], Awaitable["Look[T]"]],
        wait_s: float,
        given_up: asyncio.Future[Any] | None,
    ) -> T:
        """What `look` finds now or after a ring.

        A look under way is never cut short: what it finds would be lost.
        """
        offer.users += 1
        try:
            return await self._serve(offer, look, wait_s, given_up)
        finally:
            offer.users -= 1

    async def _serve(
        self,
        offer: "SharedOffer",
        look: Callable[[], Awaitable["Look[T]"]],
        wait_s: float,
        given_up: asyncio.Future[Any] | None,
    ) -> T:
        ends_at = time.monotonic() + wait_s
        seen = await look()
        if seen.slow:
            ends_at = max(ends_at, time.monotonic() + _PROMPT_S)
        while not (seen.found or seen.is_last or self.closed):
            left = ends_at - time.monotonic()
            if left <= 0 or (given_up is not None and given_up.done()):
                break
            ends = seen.slow if given_up is None else (*seen.slow, given_up)
            place = await offer.ring(left, ends)
            if place is None:
                if any(part.done() for part in seen.slow):
                    seen = await look()
                continue
            try:
                seen = await look()
            except BaseException:
                offer.hand_on(place)
                raise
            if seen.refused:
                offer.hand_on(place)
            elif not seen.found:
                await offer.pass_on(place)
        if seen.found:
            offer.wake_for_rest()
        return seen.found

    def offer(
        self, lanes: Iterable[str], offered: str, namespaces: Sequence[str] | None, instance: str
    ) -> "SharedOffer":
        """What is shared by workers that offer these tokens (CSV) to these lanes and namespaces."""
        lanes = tuple(sorted(lanes))
        key = lanes, offered, None if namespaces is None else tuple(namespaces)
        offer = self._offers.pop(key, None)
        if offer is None:
            self._forget()
            tokens = Offer(offered, namespaces)
            offer = SharedOffer(self._backend, lanes, tokens, instance, self._bells)
        self._offers[key] = offer
        offer.used_at = time.monotonic()
        return offer

    def _forget(self) -> None:
        """Of the two offers that were not used the longest, drop what is old or one too many."""
        for key in [*islice(self._offers, 2)]:
            offer = self._offers[key]
            if offer.users or not offer.is_resting:
                self._offers[key] = self._offers.pop(key)
            elif offer.is_old or len(self._offers) >= _MOST_BELLS:
                self._offers.pop(key).drop()

    async def aclose(self) -> None:
        """End every wait, and close the doorbells."""
        self.closed = True
        await asyncio.gather(*(offer.aclose() for offer in self._offers.values()))
        await self._admissions.aclose()


class Bells:
    """How many more doorbells may be opened."""

    def __init__(self) -> None:
        self.free = _MOST_BELLS


class SharedOffer:
    """The hints of workers that may take the same work, and those of them that wait for it.

    A ring wakes one of them. It wakes the next one if it leaves work.
    """

    def __init__(
        self, backend: Backend, lanes: Sequence[str], offer: Offer, instance: str, bells: Bells
    ) -> None:
        self._backend = backend
        self._offer = offer
        self._bells = bells
        self._has_bell = False
        self._rests = False
        self.users = 0
        """How many claims use it now."""
        self.lanes = LaneRotation(lanes, backend.counts, instance)
        self.waiters: deque[asyncio.Future[WorkPlace | None]] = deque()
        self.used_at = time.monotonic()
        self._wanted = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None
        self._bell = backend.wakeups.listen(lanes)
        self.visits = Visits(self._returned) if self._bell.many_servers else None
        self._passed: dict[WorkPlace, float] = {}

    @property
    def is_resting(self) -> bool:
        """Whether it hears no ring now that would be lost."""
        return self._listener is None or self._rests

    @property
    def is_old(self) -> bool:
        """Whether no worker has used this for a while."""
        return time.monotonic() - self.used_at > _IDLE_S

    def drop(self) -> None:
        """Close the doorbell of an offer that rests."""
        if self._listener is not None:
            self._listener.cancel()

    async def ring(self, seconds: float, ends: Iterable[asyncio.Future[Any]]) -> WorkPlace | None:
        """Wait in turn for a place that may hold work; None after `seconds` or when one ends."""
        waiter: asyncio.Future[WorkPlace | None] = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        self._wanted.set()
        if self._listener is None:
            self._listener = asyncio.create_task(self._listen(), name="ff-claim-desk")
        try:
            await asyncio.wait(
                (waiter, *ends), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        except BaseException:
            if waiter.done() and (place := waiter.result()) is not None:
                self.hand_on(place)
            raise
        finally:
            self.used_at = time.monotonic()
            with contextlib.suppress(ValueError):
                self.waiters.remove(waiter)
        return waiter.result() if waiter.done() else None

    def hand_on(self, place: WorkPlace) -> None:
        """Give a ring to another worker that waits; without one, the next claim looks there."""
        lane_id, tag = place
        self.lanes[lane_id].add(tag)
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(place)
                return

    def _returned(self, visit: asyncio.Task[Any]) -> None:
        if not visit.cancelled() and (error := visit.exception()) is not None:
            log.debug("a claim failed: %s", error)
        # It may have hinted at its place again.
        self.wake_for_rest()

    def wake_for_rest(self) -> None:
        """Wake another worker if a claim left work."""
        for lane in self.lanes:
            if (tag := lane.oldest()) is not None:
                self.hand_on((lane.lane_id, tag))
                return

    async def pass_on(self, place: WorkPlace) -> None:
        """Pass a ring that led to nothing to workers elsewhere, once per interval."""
        now = time.monotonic()
        if now - self._passed.get(place, -math.inf) >= _LISTEN_S:
            self._passed = {known: at for known, at in self._passed.items() if now - at < _LISTEN_S}
            self._passed[place] = now
            await self._ring_again(place)

    async def _ring_again(self, place: WorkPlace) -> None:
        lane_id, tag = place
        try:
            await self._backend.wakeups.ring_waiting({tag: [lane_id]})
        except EngineError as error:
            log.debug("could not wake another worker: %s", error)

    async def _listen(self) -> None:
        """Turn rings into hints while workers wait, and sweep when no ring comes."""
        backoff = Backoff(*_PAUSES_S)
        try:
            while await self._is_wanted():
                try:
                    places = await self._rings()
                    if not places:
                        lanes, width = self.lanes.some(_SWEPT_LANES), self._bell.sweep_width
                        places = await sweep(lanes, self._backend, width)
                    backoff.reset()
                except EngineError as error:
                    log.debug("lost the doorbell connection: %s", error)
                    await asyncio.sleep(backoff.jittered_s())
                    self.lanes.hint_own(self._backend)
                    self.wake_for_rest()
                    continue
                for place in places:
                    if self.waiters:
                        self.hand_on(place)
                    else:
                        await self._ring_again(place)
        finally:
            self._listener = None
            if self._has_bell:
                self._has_bell = False
                self._bells.free += 1
            await self._bell.aclose()

    async def _rings(self) -> list[WorkPlace]:
        """The places that rang; none after `_LISTEN_S`, or if there are too many doorbells."""
        if not self._has_bell:
            if not self._bells.free:
                await asyncio.sleep(_LISTEN_S)
                return []
            self._bells.free -= 1
            self._has_bell = True
        self._bell.hear(self._offer)
        return await self._bell.wait(_LISTEN_S)

    async def _is_wanted(self) -> bool:
        """Whether a worker waits, or begins to before the doorbell is closed."""
        while not self.waiters:
            self._wanted.clear()
            self._rests = True
            try:
                async with asyncio.timeout(_IDLE_S):
                    await self._wanted.wait()
            except TimeoutError:
                return False
            finally:
                self._rests = False
        return True

    async def aclose(self) -> None:
        """Wake everyone who waits, with nothing, and close the doorbell."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        if (listener := self._listener) is not None:
            listener.cancel()
            await asyncio.wait([listener])
        if self.visits is not None:
            # What a visit claims is still answered.
            await self.visits.wait(_PROMPT_S)
            self.visits.cancel()
            await self.visits.wait()
