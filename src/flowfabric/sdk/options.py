"""Options of submissions."""

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
    """Identifies the call: a submission with the same key and another digest is rejected."""
    tags: Mapping[str, str] | None
    policy: ExecutionPolicy | None
    delay_until: int | None
    delay_ms: int | None
    execution_deadline_at: int | None
