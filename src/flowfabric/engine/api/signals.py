"""Delivering signals: with a waitpoint's token, or vouched for by the engine itself."""

from __future__ import annotations

from typing import Any, Protocol

from flowfabric.core.contracts.suspension import SignalOutcome
from flowfabric.core.ids import ExecutionId, WaitpointToken
from flowfabric.engine.api.concern import Concern

_DAY_MS = 86_400_000


class Signals(Concern, Protocol):
    """Delivering signals: with a waitpoint's token, or vouched for by the engine itself."""

    async def deliver_signal(
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
        dedup_ttl_ms: int = _DAY_MS,
        resume_delay_ms: int = 0,
        max_signals_per_execution: int | None = None,
        signal_maxlen: int = 1000,
    ) -> SignalOutcome:
        """Deliver an authenticated message to a waitpoint; resumes when it satisfies.

        The token proves the right to answer, not who answers: `source_type` and
        `source_identity` are what the sender says. `source_type="operator"` is refused, because
        only `deliver_approval_signal` vouches for a person.

        A payload labelled `json` must be JSON of at most 100 levels. Without a label, one that is
        gets this label, and any other payload gets none.

        The last four are for trusted callers. Pass none of them on behalf of somebody who holds
        nothing but a waitpoint token.
        """
        ...

    async def deliver_approval_signal(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        signal_name: str,
        *,
        idempotency_suffix: str = "",
        decided_by: str = "",
        payload: bytes | None = None,
        payload_encoding: str | None = None,
        lane_id: str = "",
        signal_dedup_ttl_ms: int = _DAY_MS,
        maxlen: int = 1000,
        max_signals_per_execution: int | None = None,
    ) -> SignalOutcome:
        """Deliver an operator's decision without a token. Authorise this call.

        The signal has the source type "operator" and the identity `decided_by`, which handlers
        and `CountKind.DISTINCT_OPERATORS` trust. Without a suffix, each `decided_by` decides once
        per signal name.
        """
        ...

    async def read_waitpoint_token(
        self, execution_id: ExecutionId, waitpoint_id: str
    ) -> WaitpointToken | None:
        """The token of an open waitpoint, minted again when its key has expired; authorise this."""
        ...

    async def verify_and_deliver(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        presented: WaitpointToken | str,
        signal_name: str,
        **options: Any,
    ) -> SignalOutcome:
        """`deliver_signal` for bridges: tells an unknown waitpoint from a wrong token.

        No open waitpoint is `waitpoint_token_not_found`, another token `invalid_token`. A bridge
        that outsiders reach must answer the same to both. The engine checks the token again.
        """
        ...
