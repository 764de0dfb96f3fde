"""The client for ordinary, blocking code."""

from __future__ import annotations

import builtins
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

from flowfabric.core.closing import Closing
from flowfabric.core.contracts.executions import (
    Cancelled,
    CreateOutcome,
    ExecutionContext,
    ExecutionPage,
    ExecutionSnapshot,
    NewExecution,
    PriorityChanged,
    Replayed,
)
from flowfabric.core.contracts.lease_events import EventFilter
from flowfabric.core.contracts.leases import RevokeOutcome
from flowfabric.core.contracts.streams import (
    StreamedFrame,
    StreamFrames,
    SummaryDocument,
    Visibility,
)
from flowfabric.core.contracts.suspension import (
    HmacKids,
    OpenWaitpoints,
    Resumed,
    RotationSummary,
    SignalOutcome,
    SuspendedPage,
)
from flowfabric.core.durations import Duration
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId, WaitpointToken
from flowfabric.core.policy import ExecutionPolicy
from flowfabric.engine.feed_reader import Start
from flowfabric.engine.listing import Filter
from flowfabric.engine.secrets import DEFAULT_GRACE_MS
from flowfabric.sdk.client import Client, Outcome
from flowfabric.sdk.portal import Portal, iterate
from flowfabric.sdk.sync_feed import SyncLeaseFeed
from flowfabric.sdk.tail import Tail
from flowfabric.valkey.address import Address

__all__ = ["SyncClient"]

T = TypeVar("T")


class SyncClient(Closing):
    """`Client` without `await`: the same methods, usable from several threads and after a fork.

    >>> with SyncClient.connect("valkey://127.0.0.1:6379") as client:
    ...     created = client.submit("resize", b'{"width": 80}')
    ...     print(client.result(created.execution_id, timeout=10))
    """

    def __init__(self, open_client: Callable[[], Awaitable[Client]]) -> None:
        self._open = open_client
        self._portal = Portal("ff-sync-client")
        self._client: Client | None = None
        self._generation = -1
        try:
            self._portal.call(self._ready)
        except BaseException:
            self.close()
            raise

    @classmethod
    def connect(cls, place: Address | str, namespace: str = "default") -> Self:
        """A client of the deployment at an address or url."""
        return cls(lambda: Client.connect(place, namespace))

    async def _ready(self) -> Client:
        """The client of the portal's present loop; after a fork a new one."""
        if self._client is None or self._generation != self._portal.generation:
            generation = self._portal.generation
            client = await self._open()
            if self._generation == generation and self._client is not None:
                await client.aclose()
            else:
                self._client, self._generation = client, generation
        return self._client

    def _call(self, use: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        async def run() -> T:
            return await use(await self._ready())

        return self._portal.call(run)

    @property
    def namespace(self) -> str:
        """The namespace of what this client submits."""
        return self._known().namespace

    def _known(self) -> Client:
        assert self._client is not None
        return self._client

    def new_execution(
        self,
        kind: str,
        payload: bytes = b"",
        *,
        lane: str = "default",
        execution_id: ExecutionId | None = None,
        **fields: Any,
    ) -> NewExecution:
        """One execution to submit, with an id minted for its lane unless one is given."""
        return self._known().new_execution(
            kind, payload, lane=lane, execution_id=execution_id, **fields
        )

    def submit(
        self,
        kind: str,
        payload: bytes = b"",
        *,
        lane: str = "default",
        payload_encoding: str = "",
        priority: int | None = None,
        creator_identity: str = "",
        idempotency_key: str = "",
        tags: Mapping[str, str] | None = None,
        policy: ExecutionPolicy | None = None,
        delay_until: int | None = None,
        delay_ms: int | None = None,
        execution_deadline_at: int | None = None,
        execution_id: ExecutionId | None = None,
    ) -> CreateOutcome:
        """Submit one execution; with an idempotency key or a fixed id at most once."""
        return self._call(
            lambda client: client.submit(
                kind,
                payload,
                lane=lane,
                payload_encoding=payload_encoding,
                priority=priority,
                creator_identity=creator_identity,
                idempotency_key=idempotency_key,
                tags=tags,
                policy=policy,
                delay_until=delay_until,
                delay_ms=delay_ms,
                execution_deadline_at=execution_deadline_at,
                execution_id=execution_id,
            )
        )

    def submit_many(
        self, items: Sequence[NewExecution]
    ) -> builtins.list[CreateOutcome | EngineError]:
        """Submit many in few round trips; answers stand in input order."""
        return self._call(lambda client: client.submit_many(items))

    def inspect(self, execution_id: ExecutionId) -> ExecutionSnapshot | None:
        """A snapshot, or None when it never existed or was trimmed."""
        return self._call(lambda client: client.inspect(execution_id))

    def wait(self, execution_id: ExecutionId, timeout: Duration | None = None) -> Outcome:
        """Wait until the execution has ended; the end is pushed, not polled for."""
        return self._call(lambda client: client.wait(execution_id, timeout))

    def result(self, execution_id: ExecutionId, timeout: Duration | None = None) -> bytes | None:
        """Wait for the result bytes; an execution that ended otherwise raises its `RunError`."""
        return self._call(lambda client: client.result(execution_id, timeout))

    def success(self, execution_id: ExecutionId, timeout: Duration | None = None) -> Outcome:
        """Wait for a successful end; any other raises its `RunError`."""
        return self._call(lambda client: client.success(execution_id, timeout))

    def result_now(self, execution_id: ExecutionId) -> bytes | None:
        """The result bytes without waiting; `NotFinished` when it has not ended."""
        return self._call(lambda client: client.result_now(execution_id))

    def cancel(self, execution_id: ExecutionId, reason: str = "") -> Cancelled:
        """Cancel from any phase; a running handler learns of it with its next renewal."""
        return self._call(lambda client: client.cancel(execution_id, reason))

    def replay(
        self,
        execution_id: ExecutionId,
        reason: str = "",
        *,
        requested_by: str = "",
        expected_replay_count: int | None = None,
        keep_steps: bool = False,
    ) -> Replayed:
        """Rerun a finished execution under the same id."""
        return self._call(
            lambda client: client.replay(
                execution_id,
                reason,
                requested_by=requested_by,
                expected_replay_count=expected_replay_count,
                keep_steps=keep_steps,
            )
        )

    def revoke_lease(
        self,
        execution_id: ExecutionId,
        *,
        expected_lease_id: str = "",
        reason: str = "operator",
        revoked_by: str = "operator",
    ) -> RevokeOutcome:
        """Take the lease from the worker that holds it; another worker continues the attempt."""
        return self._call(
            lambda client: client.revoke_lease(
                execution_id,
                expected_lease_id=expected_lease_id,
                reason=reason,
                revoked_by=revoked_by,
            )
        )

    def change_priority(self, execution_id: ExecutionId, priority: int) -> PriorityChanged:
        """Move an execution that is not running yet forward or back."""
        return self._call(lambda client: client.change_priority(execution_id, priority))

    def read_context(self, execution_id: ExecutionId) -> ExecutionContext | None:
        """Payload, kind and tags, or None when there is no such execution."""
        return self._call(lambda client: client.read_context(execution_id))

    def list(
        self, *, cursor: str = "", limit: int = 50, where: Filter | None = None
    ) -> ExecutionPage:
        """Executions, page by page."""
        return self._call(lambda client: client.list(cursor=cursor, limit=limit, where=where))

    # --- waits and output -----------------------------------------------------------------

    def deliver_signal(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        waitpoint_token: WaitpointToken | str,
        signal_name: str,
        *,
        payload: bytes | None = None,
        payload_encoding: str | None = None,
        signal_category: str = "default",
        source_type: str = "external",
        source_identity: str = "",
        correlation_id: str = "",
        idempotency_key: str = "",
        target_scope: str = "waitpoint",
        signal_id: str | None = None,
        created_at: int | None = None,
        dedup_ttl_ms: int = 86_400_000,
        resume_delay_ms: int = 0,
        max_signals_per_execution: int | None = None,
        signal_maxlen: int = 1_000,
    ) -> SignalOutcome:
        """Answer a wait with its token."""
        return self._call(
            lambda client: client.deliver_signal(
                execution_id,
                waitpoint_id,
                waitpoint_token,
                signal_name,
                payload=payload,
                payload_encoding=payload_encoding,
                signal_category=signal_category,
                source_type=source_type,
                source_identity=source_identity,
                correlation_id=correlation_id,
                idempotency_key=idempotency_key,
                target_scope=target_scope,
                signal_id=signal_id,
                created_at=created_at,
                dedup_ttl_ms=dedup_ttl_ms,
                resume_delay_ms=resume_delay_ms,
                max_signals_per_execution=max_signals_per_execution,
                signal_maxlen=signal_maxlen,
            )
        )

    def signal(
        self, execution_id: ExecutionId, waitpoint: str, signal_name: str, **options: Any
    ) -> SignalOutcome:
        """Answer an open wait, named by its key or id, without having its token."""
        return self._call(
            lambda client: client.signal(execution_id, waitpoint, signal_name, **options)
        )

    def approve(
        self,
        execution_id: ExecutionId,
        waitpoint: str,
        signal_name: str = "approved",
        decided_by: str = "",
        payload: bytes | None = None,
        payload_encoding: str | None = None,
    ) -> SignalOutcome:
        """Decide as an operator; `waitpoint` is the key or the id of an open one."""
        return self._call(
            lambda client: client.approve(
                execution_id, waitpoint, signal_name, decided_by, payload, payload_encoding
            )
        )

    def resume(
        self,
        execution_id: ExecutionId,
        *,
        trigger_type: str = "operator",
        resume_delay_ms: int = 0,
    ) -> Resumed:
        """End a pause by hand, whatever it waits for."""
        return self._call(
            lambda client: client.resume(
                execution_id, trigger_type=trigger_type, resume_delay_ms=resume_delay_ms
            )
        )

    def list_suspended(
        self, *, partition: int | None = None, cursor: str = "", limit: int = 100
    ) -> SuspendedPage:
        """Suspended executions, page by page."""
        return self._call(
            lambda client: client.list_suspended(partition=partition, cursor=cursor, limit=limit)
        )

    def list_pending_waitpoints(
        self, execution_id: ExecutionId, after: str = "", limit: int = 100
    ) -> OpenWaitpoints:
        """What an execution can be answered now, without the tokens."""
        return self._call(lambda client: client.list_pending_waitpoints(execution_id, after, limit))

    def read_waitpoint_token(
        self, execution_id: ExecutionId, waitpoint_id: str
    ) -> WaitpointToken | None:
        """The token of an open waitpoint: whoever has it may answer."""
        return self._call(lambda client: client.read_waitpoint_token(execution_id, waitpoint_id))

    def close_waitpoint(
        self, execution_id: ExecutionId, waitpoint_id: str, reason: str = "proactive_close"
    ) -> bool:
        """Close a waitpoint: its token stops working. False if it was closed before."""
        return self._call(lambda client: client.close_waitpoint(execution_id, waitpoint_id, reason))

    def rotate_waitpoint_hmac_secret_all(
        self, new_kid: str, new_secret_hex: str, grace_ms: int = DEFAULT_GRACE_MS
    ) -> RotationSummary:
        """Sign new tokens with a new secret; tokens of the old one work until the grace ends."""
        return self._call(
            lambda client: client.rotate_waitpoint_hmac_secret_all(
                new_kid, new_secret_hex, grace_ms
            )
        )

    def list_waitpoint_hmac_kids(self, partition: int = 0) -> HmacKids:
        """The names of the signing keys that a partition accepts, without their secrets."""
        return self._call(lambda client: client.list_waitpoint_hmac_kids(partition))

    def verify_and_deliver(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        presented: WaitpointToken | str,
        signal_name: str,
        **options: Any,
    ) -> SignalOutcome:
        """`deliver_signal` for bridges: tells an unknown waitpoint from a wrong token."""
        return self._call(
            lambda client: client.verify_and_deliver(
                execution_id, waitpoint_id, presented, signal_name, **options
            )
        )

    def read_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        from_: str = "start",
        to: str = "end",
        count: int = 100,
        visibility: Visibility = "all",
    ) -> StreamFrames:
        """Output of one attempt, both ends of the range included."""
        return self._call(
            lambda client: client.read_stream(
                execution_id, attempt_index, from_, to, count, visibility
            )
        )

    def read_summary(self, execution_id: ExecutionId, attempt_index: int) -> SummaryDocument | None:
        """The summary document of an attempt; None if the attempt wrote none."""
        return self._call(lambda client: client.read_summary(execution_id, attempt_index))

    def tail(
        self,
        execution_id: ExecutionId,
        attempt: int | Literal["latest"] = "latest",
        follow_attempts: bool = True,  # noqa: FBT001, FBT002 - given by name as a rule
        after: str = "0-0",
        visibility: Visibility = "all",
    ) -> Iterator[StreamedFrame]:
        """Output as it comes, over retries and reclaims, until the execution has ended."""

        async def begin(client: Client) -> Tail:
            return client.tail(execution_id, attempt, follow_attempts, after, visibility)

        return iterate(self._call(begin), self._portal.call)

    def subscribe_lease_history(
        self,
        cursor: Start = "now",
        where: EventFilter | None = None,
        *,
        partitions: Sequence[int] | None = None,
    ) -> SyncLeaseFeed:
        """Follow who holds which execution: every claim, renewal, loss and return of a lease.

        >>> with client.subscribe_lease_history() as history:  # doctest: +SKIP
        ...     for event in history:
        ...         print(event.kind, event.execution_id, event.worker_instance_id)
        """
        feed = self._call(
            lambda client: client.subscribe_lease_history(cursor, where, partitions=partitions)
        )
        return SyncLeaseFeed(feed, self._portal)

    def mint(self, lane: str, count: int) -> Iterable[ExecutionId]:
        """New ids for executions of a lane."""
        return self._known().mint(lane, count)

    def close(self) -> None:
        """Close every connection and end the thread; calls still waiting fail."""
        current = self._generation == self._portal.generation
        client = self._client if current else None
        self._portal.close(None if client is None else client.aclose)
