"""Creating, ending, pausing and changing executions."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from flowfabric.core import ids
from flowfabric.core.contracts import executions
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.flows import Dependency
from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.errors import ConflictError, EngineError, ValidationError, invalid_input
from flowfabric.core.graph import SUBFLOW, check_passing
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.core.policy import ExecutionPolicy, parse_policy
from flowfabric.core.tags import validate_creation_tags, validate_tag_key
from flowfabric.engine.api import check
from flowfabric.engine.api.concern import Concern
from flowfabric.engine.api.flows import check_member, tag_of

Holder = Handle | Fence
NO_FENCE = Fence()
BATCH = 256
"""The most items that one engine call accepts."""
PART = 128
"""How many items of a batch to send per call, because a call blocks the server."""
BATCH_BYTES = 4_194_304
"""The most bytes of payloads and options it takes, unless a single item is larger."""
DIGEST_BYTES = 32
_POLICY_CACHE = 256
_policies: dict[int, tuple[ExecutionPolicy, str]] = {}


class Completion(msgspec.Struct, frozen=True):
    """One execution to complete: its handle and result (None = no result)."""

    handle: Handle
    result_payload: bytes | None = None
    result_encoding: str = ""


class FailedAttempt(msgspec.Struct, frozen=True):
    """One attempt to fail: its handle, the reason, and the category for its retry policy."""

    handle: Handle
    reason: str
    category: str = "transient"


End = Completion | FailedAttempt
"""How the worker ends an attempt."""
EndOutcome = executions.FailOutcome | EngineError | None
"""The outcome; None means completed."""


def check_size(payload: Any, field: str, limit: int) -> None:
    """Refuse a payload that is larger than the deployment allows."""
    size = len(check.binary(payload, field))
    if size > limit:
        raise ValidationError(
            "payload_too_large", f"{field} is {size} bytes long; the limit is {limit}"
        )


def check_digest(digest: Any) -> None:
    """Refuse a digest of the wrong type or size."""
    size = len(check.binary(digest, "idempotency_digest"))
    if size > DIGEST_BYTES:
        problem = f"must be at most {DIGEST_BYTES} bytes, got {size}"
        raise invalid_input("idempotency_digest", problem)


def _names_the_same(item: NewExecution, other: NewExecution) -> bool:
    """Whether both have the same name objects, as submissions of one task do."""
    return (
        item.execution_kind is other.execution_kind
        and item.lane_id is other.lane_id
        and item.namespace is other.namespace
        and item.payload_encoding is other.payload_encoding
    )


def check_new(
    item: NewExecution, max_payload_bytes: int, checked: NewExecution | None = None
) -> None:
    """Raise an error for an execution that cannot be created; `checked` passed before."""
    if checked is None or not _names_the_same(item, checked):
        ids.validate_text(item.execution_kind, "execution_kind", required=True)
        ids.validate_lane(item.lane_id)
        ids.validate_namespace(item.namespace)
        if item.payload_encoding != "":
            check.label(item.payload_encoding, "payload_encoding")
    check_size(item.input_payload, "input_payload", max_payload_bytes)
    if item.priority is not None:
        check.whole(item.priority, "priority")
    if item.partition_id is not None and item.partition_id != item.execution_id.partition:
        raise invalid_input("partition_id", "differs from the partition inside execution_id")
    if item.idempotency_key != "" or item.idempotency_digest != b"" or item.shards != 0:
        ids.validate_text(item.idempotency_key, "idempotency_key")
        check_digest(item.idempotency_digest)
        check.whole(item.shards, "shards", 0)
    if item.creator_identity != "":
        ids.validate_text(item.creator_identity, "creator_identity")
    if item.tags or type(item.tags) is not dict:
        validate_creation_tags(item.tags)
    if item.delay_until is not None:
        check.timestamp(item.delay_until, "delay_until")
    if item.delay_ms is not None:
        check.timestamp(item.delay_ms, "delay_ms")
    if item.execution_deadline_at is not None:
        check.timestamp(item.execution_deadline_at, "execution_deadline_at")
    if item.policy is not None:
        policy_json(item.policy)


def check_kind(item: NewExecution) -> None:
    """Raise an error for a kind that no worker runs, except for members of flows."""
    if item.execution_kind == SUBFLOW and item.flow_id is None:
        raise invalid_input("execution_kind", "'subflow' is reserved for members that own a flow")


def check_joining(item: NewExecution, counts: PartitionCounts) -> None:
    """Raise an error for an execution that cannot join its flow as described."""
    if item.flow_id is None:
        raise invalid_input("depends_on", "needs flow_id: only members of a flow wait for others")
    tag = tag_of(item.flow_id, counts)
    check_member(tag, item.execution_id)
    names: set[str] = set()
    for each in check.listed(item.depends_on, "depends_on"):
        check.instance(each, Dependency, "depends_on")
        upstream = check.instance(each.upstream, ExecutionId, "depends_on.upstream")
        if upstream == item.execution_id:
            raise ConflictError("self_referencing_edge", upstream)
        check_member(tag, upstream)
        check_passing(each, "depends_on")
        if each.input_name in names:
            raise invalid_input("depends_on.input_name", f"{each.input_name!r} is used twice")
        if each.input_name:
            names.add(each.input_name)


def policy_json(policy: ExecutionPolicy) -> str:
    """A policy in stored form. Submissions of a task share the object, so it is encoded once."""
    known = _policies.get(id(policy))
    if known is not None and known[0] is policy:
        return known[1]
    check.instance(policy, ExecutionPolicy, "policy")
    if len(_policies) >= _POLICY_CACHE:
        _policies.clear()
    encoded = (parse_policy(policy) or policy).to_json().decode()
    _policies[id(policy)] = (policy, encoded)
    return encoded


def check_retry_policy(given: Any) -> None:
    """Raise an error for a retry policy that cannot be stored."""
    try:
        value: Any = msgspec.json.decode(check.text(given, "retry_policy_json"))
    except (msgspec.DecodeError, UnicodeError):
        raise ValidationError("invalid_policy_json", "malformed", undecodable=True) from None
    parse_policy({"retry_policy": value})


def in_parts(positions: list[int], sizes: list[int]) -> list[list[int]]:
    """Consecutive parts of a batch, each for one call."""
    if len(positions) <= PART and sum(sizes) <= BATCH_BYTES:
        return [positions]
    parts: list[list[int]] = [[]]
    total = 0
    for position, size in zip(positions, sizes, strict=True):
        if parts[-1] and (len(parts[-1]) == PART or total + size > BATCH_BYTES):
            parts.append([])
            total = 0
        parts[-1].append(position)
        total += size
    return parts


class Executions(Concern, Protocol):
    """Creating, ending, pausing and changing executions."""

    async def create_execution(self, new: NewExecution) -> executions.CreateOutcome:
        """Accept one unit of work, at most once per id and per idempotency key."""
        ...

    async def create_many(
        self, items: Sequence[NewExecution]
    ) -> list[executions.CreateOutcome | EngineError]:
        """Create many. Outcomes are in input order; one item's error affects no other."""
        ...

    async def complete_execution(
        self,
        execution_id: ExecutionId,
        fence: Holder = NO_FENCE,
        *,
        result_payload: bytes | None = None,
        result_encoding: str = "",
        source: str = "lease_holder",
    ) -> executions.Completed:
        """End successfully, with an optional result (None = no result)."""
        ...

    async def complete(
        self, handle: Handle, result_payload: bytes | None = None, result_encoding: str = ""
    ) -> executions.Completed:
        """`complete_execution` for the holder of the lease."""
        return await self.complete_execution(
            *(check.handle(handle).execution_id, handle),
            result_payload=result_payload,
            result_encoding=result_encoding,
        )

    async def complete_many(
        self, items: Sequence[Completion]
    ) -> list[executions.Completed | EngineError]:
        """Complete many. Outcomes are in input order; one item's error affects no other."""
        ...

    async def fail_execution(
        self,
        execution_id: ExecutionId,
        fence: Holder = NO_FENCE,
        *,
        failure_reason: str,
        failure_category: str,
        source: str = "lease_holder",
        retry_policy_json: str = "",
    ) -> executions.FailOutcome:
        """End the attempt unsuccessfully; the stored policy decides on a retry."""
        ...

    async def fail(self, handle: Handle, reason: str, category: str) -> executions.FailOutcome:
        """`fail_execution` for the holder of the lease."""
        return await self.fail_execution(
            *(check.handle(handle).execution_id, handle),
            failure_reason=reason,
            failure_category=category,
        )

    async def cancel_execution(
        self,
        execution_id: ExecutionId,
        reason: str = "",
        *,
        source: str = "operator_override",
        fence: Holder = NO_FENCE,
    ) -> executions.Cancelled:
        """End deliberately, from any phase that is not terminal."""
        ...

    async def cancel(self, handle: Handle, reason: str = "") -> executions.Cancelled:
        """`cancel_execution` for the holder of the lease."""
        execution_id = check.handle(handle).execution_id
        return await self.cancel_execution(execution_id, reason, source="worker", fence=handle)

    async def delay_execution(
        self,
        execution_id: ExecutionId,
        fence: Holder = NO_FENCE,
        *,
        delay_until: int,
        source: str = "lease_holder",
    ) -> executions.Delayed:
        """Release the lease until a time. If that time has passed, the attempt may resume now."""
        ...

    async def delay(self, handle: Handle, delay_until: int) -> executions.Delayed:
        """`delay_execution` for the holder of the lease."""
        execution_id = check.handle(handle).execution_id
        return await self.delay_execution(execution_id, handle, delay_until=delay_until)

    async def release_unknown(self, handle: Handle, kind: str) -> executions.Delayed:
        """Release the lease of a task that the holder does not know.

        The same attempt resumes at a worker that offers the task, and at no other.
        """
        ...

    async def move_to_waiting_children(
        self, execution_id: ExecutionId, fence: Holder = NO_FENCE, *, source: str = "lease_holder"
    ) -> executions.WaitChildrenOutcome:
        """Wait until the open dependencies are resolved.

        `Ready` means that there are none, `Impossible` names those that can never be resolved.
        Both keep the lease.
        """
        ...

    async def wait_children(self, handle: Handle) -> executions.WaitChildrenOutcome:
        """`move_to_waiting_children` for the holder of the lease."""
        return await self.move_to_waiting_children(check.handle(handle).execution_id, handle)

    async def update_progress(
        self,
        execution_id: ExecutionId,
        fence: Holder,
        *,
        progress_pct: int | None = None,
        progress_message: str | None = None,
    ) -> None:
        """Store the progress of an attempt: only what is given; the last write wins."""
        ...

    async def progress(
        self, handle: Handle, pct: int | None = None, message: str | None = None
    ) -> None:
        """`update_progress` for the holder of the lease."""
        await self.update_progress(
            check.handle(handle).execution_id, handle, progress_pct=pct, progress_message=message
        )

    async def change_priority(
        self, execution_id: ExecutionId, new_priority: int
    ) -> executions.PriorityChanged:
        """Store a new priority (clamped to 0..9000) for an execution that is not running yet."""
        ...

    async def replay_execution(
        self,
        execution_id: ExecutionId,
        reason: str = "",
        *,
        requested_by: str = "",
        expected_replay_count: int | None = None,
        keep_steps: bool = False,
        strict: bool = False,
        reopen_downstream: bool = False,
        include_completed: bool = False,
    ) -> executions.Replayed:
        """Rerun a finished execution under the same id.

        A skipped member of a flow waits for new runs of its upstreams; with `strict`, the call
        fails if the outcome of an upstream does not satisfy its edge. `reopen_downstream` also
        reopens the skipped members that depend on it; with `include_completed`, all that ended.
        """
        ...

    async def purge_execution(self, execution_id: ExecutionId) -> None:
        """Delete a finished execution before its retention is over; an absent one is no error."""
        ...

    async def set_execution_tags(self, execution_id: ExecutionId, tags: Mapping[str, str]) -> int:
        """Add or replace tags in any phase; returns how many pairs were written."""
        ...

    async def set_execution_tag(self, execution_id: ExecutionId, key: str, value: str) -> int:
        """`set_execution_tags` with one pair."""
        return await self.set_execution_tags(execution_id, {validate_tag_key(key): value})
