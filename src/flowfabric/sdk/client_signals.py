"""The part of a client that deals with waits, signing keys and output."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack

from flowfabric.core.contracts.streams import StreamFrames, SummaryDocument, Visibility
from flowfabric.core.contracts.suspension import (
    HmacKids,
    OpenWaitpoint,
    OpenWaitpoints,
    Resumed,
    RotationSummary,
    SignalOutcome,
    SuspendedPage,
)
from flowfabric.core.errors import NotFoundError, ValidationError
from flowfabric.core.ids import ExecutionId, WaitpointToken
from flowfabric.engine.api.secrets import DEFAULT_GRACE_MS
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.sdk.tail import Tail


class SignalOptions(TypedDict, total=False):
    """What else may go with a signal and its payload."""

    signal_category: str
    source_type: str
    source_identity: str
    """Who answers, as the sender says; the handler cannot trust it."""
    correlation_id: str
    idempotency_key: str
    """Signals with the same key count once."""
    target_scope: str
    signal_id: str | None
    created_at: int | None
    dedup_ttl_ms: int
    resume_delay_ms: int
    max_signals_per_execution: int | None
    signal_maxlen: int


async def find_waitpoint(
    backend: ValkeyBackend, execution_id: ExecutionId, waitpoint: str
) -> OpenWaitpoint:
    """The open waitpoint of this id or key.

    A key that several have is `invalid_input`, one that none has `waitpoint_not_found`.
    """
    entries: list[OpenWaitpoint] = []
    after: str | None = ""
    while after is not None:
        page = await backend.waitpoints.list_pending_waitpoints(execution_id, after, limit=1000)
        entries += page.entries
        after = page.next_cursor
    found = [entry for entry in entries if waitpoint in (entry.waitpoint_id, entry.waitpoint_key)]
    # The second wait of a handler for one name has a number.
    found = found or [e for e in entries if _unnumbered(e.waitpoint_key) == waitpoint]
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(f"{entry.waitpoint_id} ({entry.waitpoint_key})" for entry in found)
        raise ValidationError("invalid_input", f"waitpoint: {waitpoint!r} may be any of {ids}")
    keys = ", ".join(sorted(repr(entry.waitpoint_key) for entry in entries)) or "none"
    raise NotFoundError("waitpoint_not_found", f"{waitpoint!r} is not open; open: {keys}")


def _unnumbered(key: str) -> str | None:
    name, mark, _ = key.rpartition("#")
    return name if mark else None


class ClientSignals:
    """Waits, signing keys and output."""

    backend: ValkeyBackend

    async def deliver_signal(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        waitpoint_token: WaitpointToken | str,
        signal_name: str,
        *,
        payload: bytes | None = None,
        payload_encoding: str | None = None,
        **options: Unpack[SignalOptions],
    ) -> SignalOutcome:
        """Answer a wait with the token that was handed out for it."""
        return await self.backend.signals.deliver_signal(
            execution_id,
            waitpoint_id,
            waitpoint_token,
            signal_name,
            payload=payload,
            payload_encoding=payload_encoding,
            **options,
        )

    async def signal(
        self,
        execution_id: ExecutionId,
        waitpoint: str,
        signal_name: str,
        *,
        payload: bytes | None = None,
        payload_encoding: str | None = None,
        **options: Unpack[SignalOptions],
    ) -> SignalOutcome:
        """Answer an open wait, named by its key or id, without its token."""
        found = await find_waitpoint(self.backend, execution_id, waitpoint)
        token = await self.backend.signals.read_waitpoint_token(execution_id, found.waitpoint_id)
        if token is None:
            raise NotFoundError("waitpoint_not_found", f"{waitpoint!r} was closed meanwhile")
        return await self.backend.signals.deliver_signal(
            execution_id,
            found.waitpoint_id,
            token,
            signal_name,
            payload=payload,
            payload_encoding=payload_encoding,
            **options,
        )

    async def approve(
        self,
        execution_id: ExecutionId,
        waitpoint: str,
        signal_name: str = "approved",
        decided_by: str = "",
        payload: bytes | None = None,
        payload_encoding: str | None = None,
    ) -> SignalOutcome:
        """Decide as an operator; `waitpoint` is the key or the id of an open one.

        The handler sees `decided_by` as a trusted identity: pass whom you have authenticated.
        Each person decides once per signal name; a repeat is a `Duplicate`.

        >>> await client.approve(run.id, "approval", decided_by="ada")  # doctest: +SKIP
        """
        found = await find_waitpoint(self.backend, execution_id, waitpoint)
        return await self.backend.signals.deliver_approval_signal(
            execution_id,
            found.waitpoint_id,
            signal_name,
            decided_by=decided_by,
            payload=payload,
            payload_encoding=payload_encoding,
        )

    async def resume(
        self,
        execution_id: ExecutionId,
        *,
        trigger_type: str = "operator",
        resume_delay_ms: int = 0,
    ) -> Resumed:
        """End a pause by hand, whatever it waits for."""
        return await self.backend.suspensions.resume_execution(
            execution_id, trigger_type=trigger_type, resume_delay_ms=resume_delay_ms
        )

    async def list_suspended(
        self, *, partition: int | None = None, cursor: str = "", limit: int = 100
    ) -> SuspendedPage:
        """Suspended executions, page by page."""
        return await self.backend.suspensions.list_suspended(
            partition=partition, cursor=cursor, limit=limit
        )

    async def list_pending_waitpoints(
        self, execution_id: ExecutionId, after: str = "", limit: int = 100
    ) -> OpenWaitpoints:
        """What an execution can be answered now, without the tokens."""
        return await self.backend.waitpoints.list_pending_waitpoints(execution_id, after, limit)

    async def read_waitpoint_token(
        self, execution_id: ExecutionId, waitpoint_id: str
    ) -> WaitpointToken | None:
        """The token of an open waitpoint: whoever has it may answer."""
        return await self.backend.signals.read_waitpoint_token(execution_id, waitpoint_id)

    async def close_waitpoint(
        self, execution_id: ExecutionId, waitpoint_id: str, reason: str = "proactive_close"
    ) -> bool:
        """Close a waitpoint: its token stops working. False if it was closed before.

        An execution that waits only for this waitpoint stays suspended until it times out or an
        operator resumes it.
        """
        return await self.backend.waitpoints.close_waitpoint(execution_id, waitpoint_id, reason)

    async def rotate_waitpoint_hmac_secret_all(
        self, new_kid: str, new_secret_hex: str, grace_ms: int = DEFAULT_GRACE_MS
    ) -> RotationSummary:
        """Sign new tokens with a new secret; tokens of the old one work until the grace ends.

        A partition that fails does not stop the others. Repeat the call to finish it.
        """
        return await self.backend.secrets.rotate_waitpoint_hmac_secret_all(
            new_kid, new_secret_hex, grace_ms
        )

    async def list_waitpoint_hmac_kids(self, partition: int = 0) -> HmacKids:
        """The names of the signing keys that a partition accepts, without their secrets."""
        return await self.backend.secrets.list_waitpoint_hmac_kids(partition)

    async def verify_and_deliver(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        presented: WaitpointToken | str,
        signal_name: str,
        *,
        payload: bytes | None = None,
        payload_encoding: str | None = None,
        **options: Unpack[SignalOptions],
    ) -> SignalOutcome:
        """`deliver_signal` for bridges: tells an unknown waitpoint from a wrong token."""
        return await self.backend.signals.verify_and_deliver(
            execution_id,
            waitpoint_id,
            presented,
            signal_name,
            payload=payload,
            payload_encoding=payload_encoding,
            **options,
        )

    async def read_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        from_: str = "start",
        to: str = "end",
        count: int = 100,
        visibility: Visibility = "all",
    ) -> StreamFrames:
        """Output of one attempt, both ends of the range included."""
        return await self.backend.streams.read_stream(
            execution_id,
            attempt_index,
            from_=from_,
            to=to,
            count_limit=count,
            visibility=visibility,
        )

    async def read_summary(
        self, execution_id: ExecutionId, attempt_index: int
    ) -> SummaryDocument | None:
        """The summary document of an attempt; None if the attempt wrote none."""
        return await self.backend.streams.read_summary(execution_id, attempt_index)

    def tail(
        self,
        execution_id: ExecutionId,
        attempt: int | Literal["latest"] = "latest",
        follow_attempts: bool = True,  # noqa: FBT001, FBT002 - given by name as a rule
        after: str = "0-0",
        visibility: Visibility = "all",
    ) -> Tail:
        """Output as it comes, over retries and reclaims, until the execution has ended.

        `after` is a position in the output of the first attempt that is read.

        >>> async for frame in client.tail(run.id):  # doctest: +SKIP
        ...     print(frame.payload)
        """

        async def here() -> ValkeyBackend:
            return self.backend

        return Tail(
            here,
            self.backend.calls.checked(execution_id),
            attempt,
            follow_attempts=follow_attempts,
            after=after,
            visibility=visibility,
        )
