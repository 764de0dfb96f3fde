"""The part of a client that deals with waits, signing keys and output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Literal, ParamSpec, TypedDict, TypeVar, Unpack

from flowfabric.core.contracts.streams import Visibility
from flowfabric.core.contracts.suspension import (
    OpenWaitpoint,
    SignalOutcome,
)
from flowfabric.core.errors import NotFoundError, ValidationError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.secrets import Secrets
from flowfabric.engine.api.signals import Signals
from flowfabric.engine.api.streams import Streams
from flowfabric.engine.api.suspensions import Suspensions
from flowfabric.engine.api.waitpoints import Waitpoints
from flowfabric.sdk.tail import Tail

P = ParamSpec("P")
R = TypeVar("R")


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
    backend: Backend, execution_id: ExecutionId, waitpoint: str
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


def engine_call(
    concern: str, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """A method of a client that is one of the engine: `cancel = engine_call("executions", …)`."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        return getattr(getattr(self.backend, concern), name)(*args, **kwargs)

    return call


class ClientSignals:
    """Waits, signing keys and output."""

    backend: Backend

    deliver_signal = engine_call("signals", Signals.deliver_signal)
    verify_and_deliver = engine_call("signals", Signals.verify_and_deliver)
    read_waitpoint_token = engine_call("signals", Signals.read_waitpoint_token)
    list_pending_waitpoints = engine_call("waitpoints", Waitpoints.list_pending_waitpoints)
    close_waitpoint = engine_call("waitpoints", Waitpoints.close_waitpoint)
    resume = engine_call("suspensions", Suspensions.resume_execution)
    list_suspended = engine_call("suspensions", Suspensions.list_suspended)
    rotate_waitpoint_hmac_secret_all = engine_call(
        "secrets", Secrets.rotate_waitpoint_hmac_secret_all
    )
    list_waitpoint_hmac_kids = engine_call("secrets", Secrets.list_waitpoint_hmac_kids)
    read_stream = engine_call("streams", Streams.read_stream)
    read_summary = engine_call("streams", Streams.read_summary)

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
        Each person decides once per signal name; a repeat is a `DuplicateSignal`.

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

        async def here() -> Backend:
            return self.backend

        return Tail(
            here,
            ExecutionId.parse(execution_id),
            attempt,
            follow_attempts=follow_attempts,
            after=after,
            visibility=visibility,
        )
