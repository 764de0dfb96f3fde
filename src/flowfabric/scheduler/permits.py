"""Permits of a worker process: how many tasks may run, and what its claims offer.

`WorkerClaims` claims from the store; a worker that is connected to a server claims through it. Both
are `ClaimPermits`, and the rest of a worker treats them alike.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.backoff import Backoff
from flowfabric.core.contracts.leases import Claim
from flowfabric.core.errors import EngineError, WorkerAtCapacity
from flowfabric.engine import metrics
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import End, EndOutcome
from flowfabric.engine.outage import Outage

log = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")


@dataclass(eq=False, repr=False)
class ClaimPermits(ABC, Generic[T]):
    """Claims of one worker process.

    A permit is reserved before any call and stays with the task until `release`.
    """

    backend: Backend
    requests: Mapping[str, ClaimRequest]
    """What the claims of each lane ask for."""
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
    draining: bool = False
    """An operator drains this worker: claim nothing more."""
    tasks: Sequence[str] = ()
    """The tasks that this process knows; executions may wait for a worker that knows theirs."""
    no_others: bool = False
    """Whether tasks that this process does not know are left to workers that do."""
    outage: Outage = field(default_factory=Outage)
    quiet: bool = False
    """Whether it claims for workers elsewhere, which log for themselves."""

    def __post_init__(self) -> None:
        self.background: set[asyncio.Task[None]] = set()
        self.left_to_others: set[str] = set()
        """The tasks that this worker does not know and has met."""
        self.meter = metrics.active()
        self._note_offer()

    def offer(self, capabilities: Iterable[str], tasks: Iterable[str], *, no_others: bool) -> None:
        """Set what the next claims offer."""
        self.tasks, self.no_others = tuple(tasks), no_others
        csv = caps.offered_csv(capabilities, self.tasks, no_others=no_others)
        self.requests = {
            lane: msgspec.structs.replace(request, capabilities=csv)
            for lane, request in self.requests.items()
        }
        self._note_offer()

    def _note_offer(self) -> None:
        self.offered = next(iter(self.requests.values())).offer
        """What this process may take."""

    def log_unknown(self, tasks: Iterable[str]) -> None:
        """Say, once per task, that this process leaves it to others."""
        for kind in tasks:
            if kind not in self.left_to_others:
                self.left_to_others.add(kind)
                if self.quiet:
                    continue
                text = 'This worker does not know task "%s". Its executions wait for one that does.'
                log.warning(text, kind, extra={"action": "task_unknown", "execution_kind": kind})

    def drain(self, *, draining: bool = True) -> None:
        """Claim nothing more, because an operator drains this worker; or claim again."""
        if draining != self.draining and not self.quiet:
            change = "is draining" if draining else "stopped draining"
            log.info("an operator %s this worker", change, extra={"action": "worker_drain"})
        self.draining = draining
        if not draining and self.on_release is not None:
            self.on_release()

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

    async def claim_with(self, consume: Callable[[], Awaitable[Claim | R]]) -> T | R:
        """Turn a grant into a task; an outcome that is not a claim is returned unchanged."""
        if not self.reserve(1):
            if self.meter is not None:
                self.meter.count("ff_worker_at_capacity_total")
            raise WorkerAtCapacity
        since, claimed = time.monotonic(), False
        try:
            outcome = await consume()
            if not isinstance(outcome, Claim):
                return outcome
            claimed = True
        finally:
            self.free += not claimed
        self.found_at(outcome.handle.lane_id, outcome.handle.execution_id.tag)
        return self.adopt(outcome, since)

    def found_at(self, lane_id: str, tag: str) -> None:
        """Note where work was found."""

    def in_background(self, call: Callable[..., Awaitable[object]], *args: object) -> None:
        """Make a call that no caller waits for; a failure is logged at debug level."""

        async def run() -> None:
            try:
                await call(*args)
            except EngineError as error:
                log.debug("background call failed: %s", error)

        task = asyncio.get_running_loop().create_task(run())
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    @abstractmethod
    async def claim_many(self, wanted: int) -> list[T]:
        """Claim up to `wanted` executions of all lanes; empty without work or permits."""

    @abstractmethod
    async def claim_when_rung(self, wanted: int, seconds: float) -> list[T]:
        """`claim_many` that waits for work."""

    @abstractmethod
    async def complete(
        self,
        lane_id: str,
        tag: str,
        items: Sequence[End],
        may_repeat: Callable[[], bool],
        *,
        of_flow: bool = False,
    ) -> tuple[list[EndOutcome], Callable[[], list[T]]]:
        """Complete and fail executions, and claim as many.

        Repeats the same request after an outage as long as `may_repeat`. Returns the outcomes, and
        a function that returns the claimed tasks: call it when those that ended have released their
        permits.
        """

    async def wait_to_store(self, error: EngineError, backoff: Backoff) -> None:
        """Report, once per outage, that results cannot be stored, and wait before the next try."""
        if not self.outage.noticed(error, "cannot store results"):
            extra = {"action": "complete_delayed"}
            log.warning("cannot store results, trying again: %s", error, extra=extra)
        await asyncio.sleep(backoff.jittered_s())

    async def aclose(self) -> None:
        """Wait for what runs in the background."""
        await asyncio.gather(*self.background)
