"""A worker that gets its tasks from a server: it claims, renews and completes over HTTP."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import msgspec

from flowfabric.core.backoff import Backoff
from flowfabric.core.contracts.executions import RetryScheduled, TerminalFailed
from flowfabric.core.contracts.remote import RemoteClaim, RemoteClaims
from flowfabric.core.errors import EngineError, TransportError
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import BATCH, End, EndOutcome, FailedAttempt
from flowfabric.engine.http.backend import HttpBackend
from flowfabric.engine.http.leases import Row, handle_text, row_error
from flowfabric.engine.outage import Outage, is_permanent
from flowfabric.scheduler.giving_back import give_back
from flowfabric.scheduler.permits import ClaimPermits
from flowfabric.sdk.config import WorkerConfig
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.work_source import Adopt, ClaimingLoop, Start

log = logging.getLogger(__name__)

_POLL_S = 25.0
"""How long a long poll may last: less than the usual timeout of proxies."""
_PAUSES_S = (0.1, 2.0)
_SENDERS = 2
"""Completing calls in flight at a time; what ends in the meantime joins the next one."""
_SLOW_S = 1.0
"""After how long such a call no longer holds up the others: a partition's server may be away."""
_MAX_BYTES = 4_194_304
_Claimed = Callable[[], list[ClaimedTask]]


class _Answer(msgspec.Struct, frozen=True):
    """The answer to a call that completes."""

    results: list[Row]
    claims: list[RemoteClaim] = []
    draining: bool = False
    unknown_tasks: list[str] = []
    waited_ms: int = 0


@dataclass(slots=True, eq=False)
class _Ended:
    """Ended executions of one call to `complete`: either all completed or all failed."""

    items: Sequence[End]
    may_repeat: Callable[[], bool]
    outcome: asyncio.Future[tuple[list[EndOutcome], _Claimed]]
    backoff: Backoff = field(default_factory=lambda: Backoff(*_PAUSES_S))

    @property
    def failed(self) -> bool:
        """Whether the handlers failed."""
        return isinstance(self.items[0], FailedAttempt)


class ServerClaims(ClaimPermits[ClaimedTask]):
    """Claims of one worker process through a server, which runs the scheduler."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.link = cast("HttpBackend", self.backend).link
        self.body: dict[str, Any] = {}
        """What every claim says about this worker."""
        self.on_offer: Callable[[], None] | None = None
        """Called when the offered capabilities or tasks change."""
        self._unanswered: dict[str, float] = {}
        self._ended: deque[_Ended] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._sending: set[asyncio.Task[None]] = set()

    def offer(self, capabilities: Iterable[str], tasks: Iterable[str], *, no_others: bool) -> None:
        """Set what the next claims offer; interrupts a long poll, so that it starts again."""
        super().offer(capabilities, tasks, no_others=no_others)
        if self.on_offer is not None:
            self.on_offer()

    async def claim_many(self, wanted: int) -> list[ClaimedTask]:
        """Claim up to `wanted` executions of all lanes; empty without work or permits."""
        return await self.poll(wanted, 0.0)

    async def claim_when_rung(self, wanted: int, seconds: float) -> list[ClaimedTask]:
        """`claim_many` that waits for work."""
        ends_at = time.monotonic() + seconds
        while (left := ends_at - time.monotonic()) > 0 and self.free:
            if self.draining:
                await asyncio.sleep(min(left, _POLL_S))
            elif tasks := await self.poll(wanted, min(left, _POLL_S)):
                return tasks
        return []

    async def poll(self, wanted: int, wait_s: float) -> list[ClaimedTask]:
        """Claim up to `wanted` executions; the server waits for the first one."""
        most = 0 if self.draining else min(wanted, self.free, BATCH)
        if not most:
            return []
        request_id, since = self._next_request()
        try:
            found = await self._claim(most, request_id, wait_s)
        except (TransportError, asyncio.CancelledError) as error:
            if not isinstance(error, TransportError) or error.ambiguous:
                self._unanswered[request_id] = since
            raise
        self._apply_notices(found)
        return self._adopt_claims(found, since)

    async def _claim(self, most: int, request_id: str, wait_s: float = 0.0) -> RemoteClaims:
        wait_ms = round(wait_s * 1000)
        return await self.link.call(
            *("POST", f"/v1/remote/claim?wait_ms={wait_ms}", self.claim_body(most, request_id)),
            answer=RemoteClaims,
            op="claim",
            wait_s=wait_s,
            repeatable=True,
        )

    def claim_body(self, most: int, request_id: str | None = None, **more: Any) -> dict[str, Any]:
        """The body of a claim."""
        known = {"tasks": self.tasks, "other_tasks": not self.no_others}
        return self.body | known | {"max": most, "request_id": request_id} | more

    def _next_request(self) -> tuple[str, float]:
        """The request id of the next claim, and the time from which its leases count.

        Repeats a claim whose answer was lost; otherwise its leases would stay unused.
        """
        now = time.monotonic()
        ttl_s = next(iter(self.requests.values())).lease_ttl_ms / 1000
        while self._unanswered:
            request_id, since = self._unanswered.popitem()
            if now - since < ttl_s:
                return request_id, now
        return new_uuid(), now

    def _adopt_claims(self, found: "RemoteClaims | _Answer", since: float) -> list[ClaimedTask]:
        """The claimed tasks for which permits are free; releases the others."""
        claims = found.claims
        taken = self.reserve(len(claims))
        if taken < len(claims):
            unused = [each.claim.handle for each in claims[taken:]]
            self.in_background(give_back, self.backend, unused)
        # The server made the claims at least this long after the request was sent.
        since += found.waited_ms / 1000
        return [self.adopt(each.claim, since) for each in claims[:taken]]

    def _apply_notices(self, found: RemoteClaims | _Answer) -> None:
        if found.draining:
            self.drain()
        self.log_unknown(found.unknown_tasks)

    async def complete(
        self,
        lane_id: str,  # noqa: ARG002 - a server accepts executions of any lane and partition
        tag: str,  # noqa: ARG002
        items: Sequence[End],
        may_repeat: Callable[[], bool],
        *,
        of_flow: bool = False,  # noqa: ARG002
    ) -> tuple[list[EndOutcome], _Claimed]:
        """Complete or fail executions, together with others that end soon, and claim as many."""
        failed = [isinstance(item, FailedAttempt) for item in items]
        if any(failed) and not all(failed):
            return await self._complete_apart(items, failed, may_repeat)
        return await self._end(items, may_repeat)

    async def _complete_apart(
        self, items: Sequence[End], failed: Sequence[bool], may_repeat: Callable[[], bool]
    ) -> tuple[list[EndOutcome], _Claimed]:
        """Send completions and failures in separate calls, as the server requires."""
        outcomes: list[EndOutcome] = [None] * len(items)
        found: list[_Claimed] = []

        async def end(*, which: bool) -> None:
            places = [i for i, each in enumerate(failed) if each is which]
            try:
                answers, claimed = await self._end([items[i] for i in places], may_repeat)
            except EngineError as error:
                # Only these failed to be sent; the others have an outcome.
                answers, claimed = [error] * len(places), list
            for i, answer in zip(places, answers, strict=True):
                outcomes[i] = answer
            found.append(claimed)

        await asyncio.gather(end(which=False), end(which=True))
        return outcomes, lambda: [task for claimed in found for task in claimed()]

    async def _end(
        self, items: Sequence[End], may_repeat: Callable[[], bool]
    ) -> tuple[list[EndOutcome], _Claimed]:
        ended = _Ended(items, may_repeat, asyncio.get_running_loop().create_future())
        self._add(ended)
        return await ended.outcome

    def _add(self, ended: _Ended) -> None:
        self._ended.append(ended)
        if len(self._senders) < _SENDERS:
            sender = asyncio.create_task(self._send_all())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)

    async def _send_all(self) -> None:
        # Let other tasks of this loop tick join the batch.
        await asyncio.sleep(0)
        while self._ended:
            sending = asyncio.create_task(self._send(self._next_batch()))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
            await asyncio.wait([sending], timeout=_SLOW_S)

    async def _send(self, batch: list[_Ended]) -> None:
        try:
            await self._deliver(batch)
        except BaseException as error:
            for ended in batch:
                if not ended.outcome.done():
                    ended.outcome.set_exception(error)
            if not isinstance(error, EngineError):
                raise

    def _next_batch(self) -> list[_Ended]:
        batch = [self._ended.popleft()]
        count, size = len(batch[0].items), _size(batch[0].items)
        while self._ended:
            following = self._ended[0].items
            count, size = count + len(following), size + _size(following)
            if count > BATCH or size > _MAX_BYTES or self._ended[0].failed != batch[0].failed:
                break
            batch.append(self._ended.popleft())
        return batch

    async def _deliver(self, batch: list[_Ended]) -> None:
        items = [_item(item) for ended in batch for item in ended.items]
        # Ending these tasks frees their permits, so claim that many.
        room = 0 if self.stopping or self.draining else min(len(items), BATCH)
        request_id, since = new_uuid(), time.monotonic()
        body: dict[str, Any] = {"items": items}
        if room:
            body["claim"] = self.claim_body(room, request_id)
        try:
            answer = await self._post_batch(body, batch)
        except TransportError as error:
            if room and error.ambiguous:
                self._unanswered[request_id] = since
            raise
        self._apply_notices(answer)

        def claimed() -> list[ClaimedTask]:
            return self._adopt_claims(answer, since)

        rows, stored = iter(answer.results), list[tuple[_Ended, list[EndOutcome]]]()
        for ended in batch:
            outcomes = [self._outcome(next(rows), item) for item in ended.items]
            if (fault := next(filter(_may_pass, outcomes), None)) and ended.may_repeat():
                self.in_background(self._end_later, ended, fault)
            else:
                stored.append((ended, outcomes))
        for ended, outcomes in stored:
            # The last waiter adopts the claims, after all ended tasks have released their permits.
            ended.outcome.set_result((outcomes, claimed if ended is stored[-1][0] else list))
        if not stored:
            unused = [each.claim.handle for each in answer.claims]
            self.in_background(give_back, self.backend, unused)

    async def _end_later(self, ended: _Ended, fault: TransportError) -> None:
        """Send again what was refused because its partition's server is away."""
        await self.wait_to_store(fault, ended.backoff)
        self._add(ended)

    def _outcome(self, row: Row, item: End) -> EndOutcome:
        if not isinstance(item, FailedAttempt):
            return row_error(row, self.link, "complete_many")
        if error := row_error(row, self.link, "fail"):
            return error
        match row["result"]:
            case {"RetryScheduled": {"delay_until": due, "next_attempt_index": index}}:
                return RetryScheduled(due, index)
            case _:
                return TerminalFailed()

    async def _post_batch(self, body: dict[str, Any], batch: list[_Ended]) -> _Answer:
        """Repeat the request until it is answered, while any of the leases may be valid."""
        backoff, failed = Backoff(*_PAUSES_S), batch[0].failed
        while True:
            try:
                answer: _Answer = await self.link.call(
                    *("POST", f"/v1/remote/{'fail' if failed else 'complete'}", body),
                    answer=_Answer,
                    op="fail" if failed else "complete_many",
                    repeatable=True,
                )
            except EngineError as error:
                # Retryable errors include those of a server that is busy or shutting down.
                if not error.retryable or not any(ended.may_repeat() for ended in batch):
                    raise
                await self.wait_to_store(error, backoff)
            else:
                self.outage.ended()
                return answer

    async def give_back_unanswered(self) -> None:
        """Release executions that were claimed by calls whose answers were lost."""
        while self._unanswered:
            request_id, _ = self._unanswered.popitem()
            # If this fails, the leases expire.
            with contextlib.suppress(EngineError):
                found = await self._claim(0, request_id)
                await give_back(self.backend, [each.claim.handle for each in found.claims])

    async def aclose(self) -> None:
        """Release unanswered claims, then close."""
        await self.give_back_unanswered()
        await super().aclose()


def _may_pass(outcome: EndOutcome) -> TypeGuard[TransportError]:
    """Whether a repeat may store what was refused."""
    return isinstance(outcome, TransportError) and outcome.retryable


def _size(items: Sequence[End]) -> int:
    return sum(
        len(item.reason if isinstance(item, FailedAttempt) else item.result_payload or b"")
        for item in items
    )


def _item(end: End) -> dict[str, Any]:
    item: dict[str, Any] = {"handle": handle_text(end.handle)}
    if isinstance(end, FailedAttempt):
        item |= {"reason": end.reason, "category": end.category}
    elif end.result_payload is not None:
        item["result_b64"] = end.result_payload
        item["result_encoding"] = end.result_encoding
    return item


class ServerSource:
    """Work from a server, which claims for this worker and registers it."""

    def __init__(
        self,
        config: WorkerConfig,
        backend: Backend,
        requests: Mapping[str, ClaimRequest],
        adopt: Adopt,
        outage: Outage,
    ) -> None:
        self.claims = ServerClaims(backend, requests, adopt, config.permits, 0.0, outage=outage)
        self.claims.body = {
            "worker_id": config.worker_id,
            "worker_instance_id": config.worker_instance_id,
            "namespace": config.namespace,
            "namespaces": config.namespaces,
            "lanes": config.lanes,
            "capabilities": config.capabilities,
            "lease_ttl_ms": config.lease_ttl_ms,
        }

    def new_loop(self, start: Start, *, batch: int, listen_s: float) -> ClaimingLoop:  # noqa: ARG002
        """What claims for as long as the worker serves."""
        return PollLoop(self.claims, start, batch)

    async def register(self, *, only_if_absent: bool) -> None:
        """Register this process; claims renew it."""
        self.claims.drain(draining=await self._register(starting=only_if_absent))

    async def beat(self) -> bool | None:
        """Renew the registration of this process."""
        return await self._register()

    async def leave(self) -> None:
        """End the registration."""
        await self._register(leaving=True)

    async def _register(self, **more: Any) -> bool:
        claims = self.claims
        found: RemoteClaims = await claims.link.call(
            *("POST", "/v1/remote/claim", claims.claim_body(0, new_uuid(), **more)),
            answer=RemoteClaims,
            op="register_worker",
            repeatable=True,
        )
        return found.draining


class PollLoop:
    """Claims by long polls while permits are free, and starts what it claims."""

    def __init__(self, claims: ServerClaims, start: Start, batch: int) -> None:
        self._claims = claims
        self._start = start
        self._batch = batch
        self._wake = asyncio.Event()
        self._stopped = False
        self._polling: asyncio.Task[list[ClaimedTask]] | None = None
        claims.on_release = self._wake.set
        claims.on_offer = self._interrupt

    def stop(self) -> None:
        """Claim nothing more; interrupts the current long poll."""
        self._claims.stopping = self._stopped = True
        self._wake.set()
        self._interrupt()

    def _interrupt(self) -> None:
        if self._polling is not None:
            self._polling.cancel()

    async def run(self) -> None:
        """Serve until `stop`; raises permanent errors only."""
        claims, backoff = self._claims, Backoff(*_PAUSES_S)
        claims.stopping = self._stopped
        while not self._stopped:
            self._wake.clear()
            if not claims.free or claims.draining:
                if claims.meter is not None and not claims.draining:
                    claims.meter.count("ff_worker_at_capacity_total")
                await self._wake.wait()
                continue
            try:
                for task in await self._poll():
                    self._start(task)
                claims.outage.ended()
                backoff.reset()
            except EngineError as error:
                if is_permanent(error):
                    raise
                if not claims.outage.noticed(error, "claim failed"):
                    extra = {"action": "claim_failed"}
                    log.warning("claim failed, trying again: %s", error, extra=extra)
                await self._pause(backoff.jittered_s())
        await claims.give_back_unanswered()

    async def _poll(self) -> list[ClaimedTask]:
        """The claimed tasks; none if the poll was interrupted."""
        self._polling = polling = asyncio.create_task(self._claims.poll(self._batch, _POLL_S))
        try:
            await asyncio.wait((polling,))
        finally:
            self._polling = None
            polling.cancel()
        return [] if polling.cancelled() else polling.result()

    async def _pause(self, seconds: float) -> None:
        """Sleep, but return early on `stop`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._stopped:
                    self._wake.clear()
                    await self._wake.wait()
