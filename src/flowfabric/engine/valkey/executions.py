"""Creating, ending, pausing and changing executions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flowfabric.core.contracts.executions import (
    Cancelled,
    Completed,
    CreateOutcome,
    Delayed,
    FailOutcome,
    Impossible,
    Moved,
    NewExecution,
    PriorityChanged,
    Ready,
    Replayed,
    RetryScheduled,
    TerminalFailed,
    WaitChildrenOutcome,
)
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import EngineError, ValidationError, invalid_input
from flowfabric.core.ids import (
    ExecutionId,
    new_uuid,
    validate_creator_identity,
    validate_execution_kind,
    validate_idempotency_key,
    validate_lane,
    validate_namespace,
)
from flowfabric.core.policy import parse_policy
from flowfabric.core.tags import validate_creation_tags, validate_tag_key, validate_tags
from flowfabric.core.text import FAILURE_REASON_LIMIT
from flowfabric.engine.api.arguments import (
    checked_bytes,
    checked_source,
    checked_text,
    count,
    flag,
    held,
    instance,
    listed,
    reason_text,
    timestamp,
    whole,
)
from flowfabric.engine.api.batches import in_parts
from flowfabric.engine.api.executions import NO_FENCE, Completion, Holder
from flowfabric.engine.valkey.calls import FunctionCalls, decoding, proof, refusal, text, unreadable
from flowfabric.engine.valkey.creation import (
    PUBLIC,
    creation_options,
    creation_outcome,
    policy_json,
)
from flowfabric.engine.valkey.places import ValkeyPlaces, lane_limit

_INTERNAL_SOURCES = frozenset({"flow_cascade", "system_timeout"})

_PARTS_UNDER_WAY = 3


class ValkeyExecutions:
    """`Executions` on Valkey."""

    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces) -> None:
        self._calls = calls
        self._places = places

    async def create_execution(self, new: NewExecution) -> CreateOutcome:
        instance(new, NewExecution, "new")
        (outcome,) = await self.create_many([new])
        if isinstance(outcome, EngineError):
            raise outcome
        return outcome

    async def create_many(self, items: Sequence[NewExecution]) -> list[CreateOutcome | EngineError]:
        items = listed(items, "items")
        outcomes: list[CreateOutcome | EngineError | None] = [None] * len(items)
        batches: dict[str, list[int]] = {}
        for position, item in enumerate(items):
            try:
                tag = self._check_new(item).tag
            except EngineError as error:
                outcomes[position] = error
            else:
                batches.setdefault(tag, []).append(position)
        for tag, positions in batches.items():
            accepted = positions
            try:
                await self._places.register(tag, {items[i].lane_id for i in positions})
            except ValidationError as error:
                if error.code != "lane_limit_exceeded":
                    raise
                for i in positions:
                    if items[i].lane_id not in self._places.known_places[tag]:
                        outcomes[i] = lane_limit(items[i].lane_id)
                accepted = [i for i in positions if outcomes[i] is None]
            await self._create_parts(tag, items, accepted, outcomes)
        return outcomes  # pyright: ignore[reportReturnType]

    async def _create_parts(
        self, tag: str, items: Sequence[NewExecution], positions: list[int], outcomes: list[Any]
    ) -> None:
        """A few parts are under way at once: the next is packed while the server works."""
        if not positions:
            return
        options = {i: creation_options(items[i]) for i in positions}
        sizes = [len(items[i].input_payload) + len(options[i]) for i in positions]
        parts = in_parts(positions, sizes)
        if len(parts) == 1:
            await self._create_part(tag, items, positions, options, outcomes)
            return
        under_way: deque[asyncio.Task[None]] = deque()
        try:
            for part in parts:
                create = self._create_part(tag, items, part, options, outcomes)
                under_way.append(asyncio.create_task(create))
                if len(under_way) > _PARTS_UNDER_WAY:
                    await under_way[0]
                    under_way.popleft()
            while under_way:
                await under_way[0]
                under_way.popleft()
        finally:
            for task in under_way:
                task.cancel()
            if under_way:
                await asyncio.wait(under_way)

    async def _create_part(
        self,
        tag: str,
        items: Sequence[NewExecution],
        positions: list[int],
        options: Mapping[int, bytes],
        outcomes: list[Any],
    ) -> None:
        args: list[Any] = [b""]
        for position in positions:
            item = items[position]
            args += (
                item.execution_id,
                item.execution_kind,
                item.input_payload,
                item.payload_encoding,
                options[position],
            )
        reply = await self._calls.fcall("ff_create", tag, args, op="create_execution")
        with decoding(reply, "ff_create", "create_execution"):
            for position, answer in zip(positions, reply[2], strict=True):
                outcomes[position] = creation_outcome(items[position].execution_id, answer)

    def _check_new(self, item: NewExecution) -> ExecutionId:
        """The id of an execution that can be created as it is described."""
        if type(item) is not NewExecution:
            instance(item, NewExecution, "items")
        execution_id = self._calls.checked(item.execution_id)
        validate_execution_kind(item.execution_kind)
        validate_lane(item.lane_id)
        validate_namespace(item.namespace)
        self._check_size(item.input_payload, "input_payload")
        if item.payload_encoding != "":
            checked_text(item.payload_encoding, "payload_encoding")
        if item.priority is not None:
            whole(item.priority, "priority")
        if item.partition_id is not None and item.partition_id != execution_id.partition:
            raise invalid_input("partition_id", "differs from the partition inside execution_id")
        if item.idempotency_key:
            validate_idempotency_key(item.idempotency_key)
        if item.creator_identity:
            validate_creator_identity(item.creator_identity)
        if item.tags:
            validate_creation_tags(item.tags)
        if item.delay_until is not None:
            timestamp(item.delay_until, "delay_until")
        if item.delay_ms is not None:
            timestamp(item.delay_ms, "delay_ms")
        if item.execution_deadline_at is not None:
            timestamp(item.execution_deadline_at, "execution_deadline_at")
        if item.policy is not None:
            policy_json(item.policy)
        return execution_id

    def _check_size(self, payload: Any, field: str) -> None:
        size = len(checked_bytes(payload, field))
        if size > self._calls.limits.max_payload_bytes:
            raise ValidationError(
                "payload_too_large",
                f"{field} has {size} bytes, the limit is {self._calls.limits.max_payload_bytes}",
            )

    async def complete_execution(
        self,
        execution_id: ExecutionId,
        fence: Holder = NO_FENCE,
        *,
        result_payload: bytes | None = None,
        result_encoding: str = "",
        source: str = "lease_holder",
    ) -> Completed:
        execution_id = self._calls.checked(execution_id)
        args = [1, *self._completion_args(execution_id, fence, result_payload, result_encoding)]
        if source != "lease_holder":
            args[3] = checked_source(source)
        reply = await self._calls.fcall("ff_complete", execution_id.tag, args, op="complete")
        with decoding(reply, "ff_complete", "complete", execution_id):
            (answer,) = reply[2]
        error = refusal(answer, "complete", execution_id)
        if error is not None:
            raise error
        return Completed(execution_id)

    async def complete(
        self, handle: Handle, result_payload: bytes | None = None, result_encoding: str = ""
    ) -> Completed:
        held(handle)
        return await self.complete_execution(
            handle.execution_id,
            handle,
            result_payload=result_payload,
            result_encoding=result_encoding,
        )

    def _completion_args(
        self, execution_id: str, fence: Holder, result: bytes | None, encoding: str
    ) -> tuple[Any, ...]:
        if result is None:
            return (execution_id, proof(fence), "lease_holder", "0", b"")
        self._check_size(result, "result_payload")
        label = f"1{checked_text(encoding, 'result_encoding')}" if encoding != "" else "1"
        return (execution_id, proof(fence), "lease_holder", label, result)

    def item_args(self, item: Completion) -> tuple[Any, ...]:
        """What one item of a batch is sent as; the first part is its execution."""
        if type(item) is not Completion:
            instance(item, Completion, "items")
        handle = item.handle
        # What a claim gave out need not be looked at part by part.
        if type(handle) is not Handle or type(handle.execution_id) is not ExecutionId:
            held(handle)
        return self._completion_args(
            handle.execution_id, handle, item.result_payload, item.result_encoding
        )

    async def complete_many(self, items: Sequence[Completion]) -> list[Completed | EngineError]:
        items = listed(items, "items")
        outcomes: list[Completed | EngineError | None] = [None] * len(items)
        batches: dict[str, tuple[list[int], list[Any]]] = {}
        for position, item in enumerate(items):
            try:
                args = self.item_args(item)
            except ValidationError as error:
                outcomes[position] = error
                continue
            positions, flat = batches.setdefault(args[0].tag, ([], []))
            positions.append(position)
            flat += args
        for tag, (positions, flat) in batches.items():
            start = 0
            for part in in_parts(positions, [len(result) for result in flat[4::5]]):
                args = [len(part), *flat[start * 5 : (start + len(part)) * 5]]
                start += len(part)
                reply = await self._calls.fcall("ff_complete", tag, args, op="complete_many")
                with decoding(reply, "ff_complete", "complete_many"):
                    for position, answer in zip(part, reply[2], strict=True):
                        done = items[position].handle.execution_id
                        error = refusal(answer, "complete", done)
                        outcomes[position] = error or Completed(done)
        return outcomes  # pyright: ignore[reportReturnType]

    async def fail_execution(
        self,
        execution_id: ExecutionId,
        fence: Holder = NO_FENCE,
        *,
        failure_reason: str,
        failure_category: str,
        source: str = "lease_holder",
        retry_policy_json: str = "",
    ) -> FailOutcome:
        execution_id = self._calls.checked(execution_id)
        if checked_text(retry_policy_json, "retry_policy_json") and source != "operator_override":
            retry_policy_json = ""
        elif retry_policy_json:
            _check_retry_policy(retry_policy_json)
        args = (
            execution_id,
            proof(fence),
            checked_source(source),
            reason_text(failure_reason, "failure_reason", FAILURE_REASON_LIMIT),
            reason_text(failure_category, "failure_category"),
            retry_policy_json,
        )
        reply = await self._calls.fcall("ff_fail", execution_id.tag, args, op="fail")
        with decoding(reply, "ff_fail", "fail", execution_id):
            if reply[2] == b"retry_scheduled":
                return RetryScheduled(int(reply[3]), int(reply[4]))
            if reply[2] == b"terminal_failed":
                return TerminalFailed()
        raise unreadable(reply, "ff_fail", "fail", execution_id)

    async def fail(self, handle: Handle, reason: str, category: str) -> FailOutcome:
        held(handle)
        return await self.fail_execution(
            handle.execution_id, handle, failure_reason=reason, failure_category=category
        )

    async def cancel_execution(
        self,
        execution_id: ExecutionId,
        reason: str = "",
        *,
        source: str = "operator_override",
        fence: Holder = NO_FENCE,
    ) -> Cancelled:
        if checked_text(source, "source") in _INTERNAL_SOURCES:
            raise invalid_input("source", f"{source} is reserved for the engine")
        execution_id = self._calls.checked(execution_id)
        args = (execution_id, reason_text(reason, "reason"), source, proof(fence))
        reply = await self._calls.fcall("ff_cancel", execution_id.tag, args, op="cancel")
        if reply[2:3] != [b"cancelled"]:
            raise unreadable(reply, "ff_cancel", "cancel", execution_id)
        return Cancelled(execution_id)

    async def cancel(self, handle: Handle, reason: str = "") -> Cancelled:
        held(handle)
        return await self.cancel_execution(
            handle.execution_id, reason, source="worker", fence=handle
        )

    async def delay_execution(
        self,
        execution_id: ExecutionId,
        fence: Holder = NO_FENCE,
        *,
        delay_until: int,
        source: str = "lease_holder",
    ) -> Delayed:
        execution_id = self._calls.checked(execution_id)
        until = timestamp(delay_until, "delay_until", low=1)
        args = (execution_id, proof(fence), checked_source(source), until)
        reply = await self._calls.fcall("ff_delay", execution_id.tag, args, op="delay")
        with decoding(reply, "ff_delay", "delay", execution_id):
            return Delayed(execution_id, PUBLIC[reply[2]])

    async def delay(self, handle: Handle, delay_until: int) -> Delayed:
        held(handle)
        return await self.delay_execution(handle.execution_id, handle, delay_until=delay_until)

    async def move_to_waiting_children(
        self, execution_id: ExecutionId, fence: Holder = NO_FENCE, *, source: str = "lease_holder"
    ) -> WaitChildrenOutcome:
        execution_id = self._calls.checked(execution_id)
        args = (execution_id, proof(fence), checked_source(source))
        reply = await self._calls.fcall(
            "ff_wait_children", execution_id.tag, args, op="wait_children"
        )
        if reply[2:3] == [b"moved"]:
            return Moved(execution_id)
        if reply[2:3] == [b"ready"]:
            return Ready()
        with decoding(reply, "ff_wait_children", "wait_children", execution_id):
            word, upstreams = reply[2:4]
            if word == b"impossible":
                return Impossible(tuple(ExecutionId.trusted(text(each)) for each in upstreams))
        raise unreadable(reply, "ff_wait_children", "wait_children", execution_id)

    async def wait_children(self, handle: Handle) -> WaitChildrenOutcome:
        held(handle)
        return await self.move_to_waiting_children(handle.execution_id, handle)

    async def update_progress(
        self,
        execution_id: ExecutionId,
        fence: Holder,
        *,
        progress_pct: int | None = None,
        progress_message: str | None = None,
    ) -> None:
        execution_id = self._calls.checked(execution_id)
        if progress_pct is not None:
            whole(progress_pct, "progress_pct", 0, 100)
        given = "" if progress_message is None else progress_message
        message = reason_text(given, "progress_message")
        args = (
            execution_id,
            proof(fence),
            "" if progress_pct is None else progress_pct,
            "0" if progress_message is None else "1",
            message,
        )
        await self._calls.fcall("ff_progress", execution_id.tag, args, op="progress")

    async def progress(
        self, handle: Handle, pct: int | None = None, message: str | None = None
    ) -> None:
        held(handle)
        await self.update_progress(
            handle.execution_id, handle, progress_pct=pct, progress_message=message
        )

    async def change_priority(
        self, execution_id: ExecutionId, new_priority: int
    ) -> PriorityChanged:
        priority = whole(new_priority, "new_priority")
        execution_id = self._calls.checked(execution_id)
        args = (execution_id, priority, new_uuid())
        reply = await self._calls.fcall(
            "ff_change_priority", execution_id.tag, args, op="change_priority"
        )
        with decoding(reply, "ff_change_priority", "change_priority", execution_id):
            return PriorityChanged(execution_id, int(reply[2]), int(reply[3]))

    async def replay_execution(
        self,
        execution_id: ExecutionId,
        *,
        reason: str = "",
        requested_by: str = "",
        expected_replay_count: int | None = None,
        keep_steps: bool = False,
    ) -> Replayed:
        execution_id = self._calls.checked(execution_id)
        args = (
            execution_id,
            reason_text(reason, "reason"),
            reason_text(requested_by, "requested_by"),
            count(expected_replay_count, "expected_replay_count"),
            "1" if flag(keep_steps, "keep_steps") else "0",
            new_uuid(),
        )
        reply = await self._calls.fcall("ff_replay", execution_id.tag, args, op="replay_execution")
        with decoding(reply, "ff_replay", "replay_execution", execution_id):
            return Replayed(PUBLIC[reply[2]])

    async def set_execution_tags(self, execution_id: ExecutionId, tags: Mapping[str, str]) -> int:
        execution_id = self._calls.checked(execution_id)
        validate_tags(tags)
        flat = (part for pair in tags.items() for part in pair)
        reply = await self._calls.fcall(
            "ff_set_tags", execution_id.tag, (execution_id, *flat), op="set_execution_tags"
        )
        with decoding(reply, "ff_set_tags", "set_execution_tags", execution_id):
            return int(reply[2])

    async def set_execution_tag(self, execution_id: ExecutionId, key: str, value: str) -> int:
        return await self.set_execution_tags(execution_id, {validate_tag_key(key): value})


def _check_retry_policy(given: Any) -> None:
    try:
        value: Any = msgspec.json.decode(checked_text(given, "retry_policy_json"))
    except (msgspec.DecodeError, UnicodeError):
        raise ValidationError("invalid_policy_json", "malformed", undecodable=True) from None
    parse_policy({"retry_policy": value})
