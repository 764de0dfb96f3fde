"""Options of submissions and signals."""

from collections.abc import Mapping
from typing import TypedDict

from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import ExecutionPolicy


class ExecutionOptions(TypedDict, total=False):
    """What may be set for an execution besides its kind and payload."""

    lane: str
    execution_id: ExecutionId | None
    payload_encoding: str
    priority: int | None
    creator_identity: str
    idempotency_key: str
    """Submissions with the same key create one execution."""
    idempotency_digest: bytes
    """What the key is used for: a submission with the same key and another digest is refused."""
    tags: Mapping[str, str] | None
    policy: ExecutionPolicy | None
    delay_until: int | None
    delay_ms: int | None
    execution_deadline_at: int | None


class SignalOptions(TypedDict, total=False):
    """What else may go with a signal and its payload."""

    signal_category: str
    source_type: str
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


class SentSignal(SignalOptions, total=False):
    """The payload of a signal, and what else may go with it."""

    payload: bytes | None
    payload_encoding: str | None
