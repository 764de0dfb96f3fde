"""Creating, ending, pausing and changing executions."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric.core.contracts import executions
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import EngineError, ValidationError, invalid_input
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.state import PublicState
from flowfabric.core.tags import validate_tags
from flowfabric.core.text import FAILURE_REASON_LIMIT
from flowfabric.engine.api import check
from flowfabric.engine.api import executions as api
from flowfabric.engine.valkey.calls import (
    FunctionCalls,
    at_once,
    decoding,
    finished,
    proof,
    refused,
    text,
)
from flowfabric.engine.valkey.creation import packed_options
from flowfabric.engine.valkey.drains import CascadeDrains
from flowfabric.engine.valkey.placements import KeyedCreation, is_stale
from flowfabric.engine.valkey.places import ValkeyPlaces, lane_limit

PUBLIC: dict[bytes, PublicState] = {state.value.encode(): state for state in PublicState}
"""Public states as replies spell them."""
Outcomes = list[api.EndOutcome]
Created = list[executions.CreateOutcome | EngineError | None]
_ENDED = {b"cancelled": executions.Cancelled}
_INTERNAL_SOURCES = frozenset({"flow_cascade", "system_timeout"})
_PARTS_AT_ONCE = 3
_PARTITIONS_AT_ONCE = 8
_PLACEMENT_TRIES = 4
_ITEM_ARGS = 5


class ValkeyExecutions(api.Executions):
    """`Executions` on Valkey."""

    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces, drains: CascadeDrains) -> None:
        self._calls = calls
        self._places = places
        self._drains = drains
        self._keyed = KeyedCreation(calls, places.placements)
        self.on_place_changed: Callable[[str, ExecutionId, int], Awaitable[None]] | None = None
        """Called when the place of an execution among those that wait for a quota has changed."""

    async def create_execution(self, new: NewExecution) -> executions.CreateOutcome:
        check.instance(new, NewExecution, "new")
        (outcome,) = await self.create_many([new])
        if isinstance(outcome, EngineError):
            raise outcome
        return outcome

    async def create_many(
        self, items: Sequence[NewExecution]
    ) -> list[executions.CreateOutcome | EngineError]:
        items = [*check.listed(items, "items")]
        outcomes: Created = [None] * len(items)
        valid: list[int] = []
        keyed: list[int] = []
        checked: NewExecution | None = None
        for position, item in enumerate(items):
            try:
                items[position] = checked = self._checked(item, checked)
            except EngineError as error:
                outcomes[position] = error
            else:
                valid.append(position)
                if item.shards and item.idempotency_key:
                    keyed.append(position)
        if keyed:
            await self._create_keyed(items, valid, keyed, outcomes)
        else:
            await self._create(items, valid, outcomes)
        return outcomes  # pyright: ignore[reportReturnType]

    async def _create_keyed(
        self, items: list[NewExecution], valid: list[int], keyed: list[int], outcomes: Created
    ) -> None:
        """Create executions whose partitions depend on what this process knows of their lanes."""
        lanes = {items[i].lane_id for i in keyed}
        for _ in range(_PLACEMENT_TRIES):
            await self._keyed.find_earlier(items, keyed, outcomes)
            await self._create(items, [i for i in valid if outcomes[i] is None], outcomes)
            if not any(is_stale(outcomes[i]) for i in keyed):
                return
            await self._places.read_placements(lanes)
            keyed = valid = await self._keyed.place_again(items, keyed, outcomes)
        await self._create(items, valid, outcomes)

    async def _create(
        self, items: Sequence[NewExecution], positions: list[int], outcomes: Created
    ) -> None:
        batches: dict[str, list[int]] = {}
        for i in positions:
            batches.setdefault(items[i].execution_id.tag, []).append(i)

        async def create(batch: tuple[str, list[int]]) -> None:
            tag, positions = batch
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
            if accepted:
                await self._create_in(tag, items, accepted, outcomes)

        if len(batches) == 1:
            await create(*batches.items())
        else:
            await finished(_PARTITIONS_AT_ONCE, create, batches.items())

    def _checked(self, item: Any, checked: NewExecution | None) -> NewExecution:
        if type(item) is not NewExecution:
            check.instance(item, NewExecution, "items")
        known = self._calls.checked(item.execution_id)
        if known is not item.execution_id:
            item = msgspec.structs.replace(item, execution_id=known)
        api.check_new(item, self._calls.max_payload_bytes, checked)
        api.check_kind(item)
        if item.flow_id is not None or item.depends_on:
            api.check_joining(item, self._calls.counts)
        return item

    async def _create_in(
        self, tag: str, items: Sequence[NewExecution], positions: list[int], outcomes: list[Any]
    ) -> None:
        """Create executions of one partition; the next part is packed while the server works."""
        options = {i: packed_options(items[i]) for i in positions}

        async def create(part: list[int]) -> None:
            args: list[Any] = [b""]
            for i in part:
                item = items[i]
                args += (item.execution_id, item.execution_kind, item.input_payload)
                args += (item.payload_encoding, options[i])
            reply = await self._calls.fcall("ff_create", tag, args, op="create_execution")
            with decoding(reply, "ff_create", "create_execution"):
                for i, answer in zip(part, reply[2], strict=True):
                    outcomes[i] = _creation_outcome(items[i].execution_id, answer)
            self._drains.note(tag, reply[3:])

        sizes = [len(items[i].input_payload) + len(options[i]) for i in positions]
        parts = api.in_parts(positions, sizes)
        if len(parts) == 1:
            await create(positions)
        else:
            await at_once(_PARTS_AT_ONCE, create, parts)

    async def complete_execution(
        self,
        execution_id: ExecutionId,
        fence: api.Holder = api.NO_FENCE,
        *,
        result_payload: bytes | None = None,
        result_encoding: str = "",
        source: str = "lease_holder",
    ) -> executions.Completed:
        execution_id = self._calls.checked(execution_id)
        args = [1, *self._completion_args(execution_id, fence, result_payload, result_encoding)]
        if source != "lease_holder":
            args[3] = check.source(source)
        reply = await self._calls.fcall("ff_complete", execution_id.tag, args, op="complete")
        with decoding(reply, "ff_complete", "complete", execution_id):
            (answer,) = reply[2]
        if error := _completion_error(answer, execution_id):
            raise error
        return executions.Completed(
            execution_id, cascade=self._drains.cascade_counts(execution_id.tag, reply[3:])
        )

    def _completion_args(
        self, execution_id: str, fence: api.Holder, result: bytes | None, encoding: str
    ) -> tuple[Any, ...]:
        if result is None:
            return (execution_id, proof(fence), "lease_holder", "0", b"")
        api.check_size(result, "result_payload", self._calls.max_payload_bytes)
        label = f"1{check.label(encoding, 'result_encoding')}" if encoding != "" else "1"
        return (execution_id, proof(fence), "lease_holder", label, result)

    async def complete_many(
        self, items: Sequence[api.Completion]
    ) -> list[executions.Completed | EngineError]:
        items = check.listed(items, "items")
        outcomes: Outcomes = [None] * len(items)
        batches = self.ends(items, outcomes)

        async def end(tag: str, batch: tuple[list[int], list[Any]]) -> None:
            await self.end_in(tag, items, *batch, outcomes)

        for tag, fault in (await self._calls.by_partition(batches, end)).items():
            for position in batches[tag][0]:
                outcomes[position] = outcomes[position] or fault
        return [
            error
            if isinstance(error, EngineError)
            else executions.Completed(item.handle.execution_id)
            for item, error in zip(items, outcomes, strict=True)
        ]

    def ends(
        self, items: Sequence[api.End], outcomes: Outcomes, tag: str = "", *, failures: bool = False
    ) -> dict[str, tuple[list[int], list[Any]]]:
        """The positions and arguments of valid items, by partition, or all under `tag`."""
        batches: dict[str, tuple[list[int], list[Any]]] = {}
        for position, item in enumerate(items):
            try:
                args = self._end_args(item, failures=failures)
            except ValidationError as error:
                outcomes[position] = error
                continue
            positions, flat = batches.setdefault(tag or item.handle.execution_id.tag, ([], []))
            positions.append(position)
            flat += args
        return batches

    def _end_args(self, item: api.End, *, failures: bool) -> tuple[Any, ...]:
        if failures and type(item) is api.FailedAttempt:
            return _failure_args(item)
        if type(item) is not api.Completion:
            item = check.instance(item, api.Completion, "items")
        handle = item.handle
        # A handle from a claim needs no check of its parts.
        if type(handle) is not Handle or type(handle.execution_id) is not ExecutionId:
            check.handle(handle)
        return self._completion_args(
            handle.execution_id, handle, item.result_payload, item.result_encoding
        )

    async def end_in(
        self,
        tag: str,
        items: Sequence[api.End],
        positions: list[int],
        flat: list[Any],
        outcomes: Outcomes,
        claim: Sequence[Any] = (),
    ) -> list[Any]:
        """End attempts in one partition, and claim with the last call; returns its reply."""
        reply: list[Any] = []
        start = 0
        parts = api.in_parts(positions, [len(result) for result in flat[4::_ITEM_ARGS]])
        for part in parts:
            end = start + len(part) * _ITEM_ARGS
            args = [len(part), *flat[start:end], *(claim if part is parts[-1] else ())]
            start = end
            reply = await self._calls.fcall("ff_complete", tag, args, op="complete_many")
            with decoding(reply, "ff_complete", "complete_many"):
                for position, answer in zip(part, reply[2], strict=True):
                    outcomes[position] = _end_outcome(answer, items[position])
            self._drains.note(tag, reply[6:] if claim and part is parts[-1] else reply[3:])
        return reply

    async def fail_execution(
        self,
        execution_id: ExecutionId,
        fence: api.Holder = api.NO_FENCE,
        *,
        failure_reason: str,
        failure_category: str,
        source: str = "lease_holder",
        retry_policy_json: str = "",
    ) -> executions.FailOutcome:
        if check.text(retry_policy_json, "retry_policy_json") and source != "operator_override":
            retry_policy_json = ""
        elif retry_policy_json:
            api.check_retry_policy(retry_policy_json)
        args = (
            proof(fence),
            check.source(source),
            check.reason(failure_reason, "failure_reason", FAILURE_REASON_LIMIT),
            check.reason(failure_category, "failure_category"),
            retry_policy_json,
        )

        known = self._calls.checked(execution_id)

        def outcome(reply: list[Any]) -> executions.FailOutcome:
            if reply[2] == b"retry_scheduled":
                return executions.RetryScheduled(int(reply[3]), int(reply[4]))
            if reply[2] == b"terminal_failed":
                return executions.TerminalFailed(self._drains.cascade_counts(known.tag, reply[5:]))
            raise ValueError(reply)

        return await self._calls.ask_about(known, "ff_fail", args, outcome)

    async def cancel_execution(
        self,
        execution_id: ExecutionId,
        reason: str = "",
        *,
        source: str = "operator_override",
        fence: api.Holder = api.NO_FENCE,
    ) -> executions.Cancelled:
        if check.text(source, "source") in _INTERNAL_SOURCES:
            raise invalid_input("source", f"{source} is reserved for the engine")
        args = (check.reason(reason, "reason"), source, proof(fence))
        known = ExecutionId(execution_id)

        def outcome(reply: list[Any]) -> executions.Cancelled:
            return _ENDED[reply[2]](
                known, cascade=self._drains.cascade_counts(known.tag, reply[3:])
            )

        return await self._calls.ask_about(execution_id, "ff_cancel", args, outcome)

    async def delay_execution(
        self,
        execution_id: ExecutionId,
        fence: api.Holder = api.NO_FENCE,
        *,
        delay_until: int,
        source: str = "lease_holder",
    ) -> executions.Delayed:
        until = check.timestamp(delay_until, "delay_until", low=1)
        args = (proof(fence), check.source(source), until)
        state = await self._calls.ask_about(execution_id, "ff_delay", args, _public_state)
        return executions.Delayed(ExecutionId(execution_id), state)

    async def release_unknown(self, handle: Handle, kind: str) -> executions.Delayed:
        execution_id = check.handle(handle).execution_id
        args = (proof(handle), "lease_holder", check.text(kind, "kind"))
        state = await self._calls.ask_about(execution_id, "ff_release_unknown", args, _public_state)
        return executions.Delayed(execution_id, state)

    async def move_to_waiting_children(
        self,
        execution_id: ExecutionId,
        fence: api.Holder = api.NO_FENCE,
        *,
        source: str = "lease_holder",
    ) -> executions.WaitChildrenOutcome:
        def outcome(reply: list[Any]) -> executions.WaitChildrenOutcome:
            match reply[2:]:
                case [b"moved", *_]:
                    return executions.Moved(ExecutionId(execution_id))
                case [b"ready", *_]:
                    return executions.Ready()
                case [b"impossible", ids, *_]:
                    return executions.Impossible(tuple(ExecutionId.trusted(text(i)) for i in ids))
                case _:
                    raise ValueError(reply)

        args = (proof(fence), check.source(source))
        return await self._calls.ask_about(execution_id, "ff_wait_children", args, outcome)

    async def update_progress(
        self,
        execution_id: ExecutionId,
        fence: api.Holder,
        *,
        progress_pct: int | None = None,
        progress_message: str | None = None,
    ) -> None:
        args = (
            proof(fence),
            "" if progress_pct is None else check.whole(progress_pct, "progress_pct", 0, 100),
            "0" if progress_message is None else "1",
            check.reason("" if progress_message is None else progress_message, "progress_message"),
        )
        await self._calls.ask_about(execution_id, "ff_progress", args, lambda _: None)

    async def change_priority(
        self, execution_id: ExecutionId, new_priority: int
    ) -> executions.PriorityChanged:
        args = (check.whole(new_priority, "new_priority"), new_uuid())

        def decode(reply: list[Any]) -> tuple[executions.PriorityChanged, str, int]:
            old, new = int(reply[2]), int(reply[3])
            changed = executions.PriorityChanged(ExecutionId(execution_id), old, new)
            return changed, text(reply[4]), int(reply[5])

        changed, quota_policy_id, place = await self._calls.ask_about(
            execution_id, "ff_change_priority", args, decode
        )
        if quota_policy_id and self.on_place_changed is not None:
            await self.on_place_changed(quota_policy_id, changed.execution_id, place)
        return changed

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
        reopen = 0
        if check.flag(reopen_downstream, "reopen_downstream"):
            reopen = 2 if check.flag(include_completed, "include_completed") else 1
        args = (
            check.reason(reason, "reason"),
            check.reason(requested_by, "requested_by"),
            check.count(expected_replay_count, "expected_replay_count"),
            "1" if check.flag(keep_steps, "keep_steps") else "0",
            new_uuid(),
            "1" if check.flag(strict, "strict") else "0",
            reopen,
        )

        known = self._calls.checked(execution_id)

        def outcome(reply: list[Any]) -> executions.Replayed:
            self._drains.note(known.tag, reply[4:])
            return executions.Replayed(_public_state(reply), int(reply[3]))

        return await self._calls.ask_about(known, "ff_replay", args, outcome, op="replay_execution")

    async def purge_execution(self, execution_id: ExecutionId) -> None:
        await self._calls.ask_about(
            execution_id, "ff_purge_execution", (), lambda _: None, op="purge_execution"
        )

    async def set_execution_tags(self, execution_id: ExecutionId, tags: Mapping[str, str]) -> int:
        validate_tags(tags)
        flat = [part for pair in tags.items() for part in pair]
        return await self._calls.ask_about(
            *(execution_id, "ff_set_tags", flat),
            lambda reply: int(reply[2]),
            op="set_execution_tags",
        )


def _creation_outcome(
    execution_id: ExecutionId, answer: Any
) -> executions.CreateOutcome | EngineError:
    match answer:
        case bytes() if answer in PUBLIC:
            return executions.Created(execution_id, PUBLIC[answer])
        case [1, b"DUPLICATE", known, *_]:
            return executions.Duplicate(ExecutionId.trusted(text(known)))
        case _:
            return refused(answer, "ff_create", "create_execution", execution_id)


def _completion_error(answer: Any, execution_id: str) -> EngineError | None:
    """None when the item succeeded; a newer library may add parts to a success."""
    match answer:
        case b"completed" | [1, b"completed", *_]:
            return None
        case _:
            return refused(answer, "ff_complete", "complete", execution_id)


def _failure_args(item: api.FailedAttempt) -> tuple[Any, ...]:
    category = check.reason(item.category, "category")
    reason = check.reason(item.reason, "reason", FAILURE_REASON_LIMIT)
    handle = check.handle(item.handle)
    return (handle.execution_id, proof(handle), "lease_holder", f"2{category}", reason)


def _end_outcome(answer: Any, item: api.End) -> api.EndOutcome:
    execution_id = item.handle.execution_id
    if type(item) is not api.FailedAttempt:
        return _completion_error(answer, execution_id)
    match answer:
        case [1, b"retry_scheduled", due, next_index, *_]:
            return executions.RetryScheduled(int(due), int(next_index))
        case [1, b"terminal_failed", *_]:
            return executions.TerminalFailed()
        case _:
            return refused(answer, "ff_complete", "fail", execution_id)


def _public_state(reply: list[Any]) -> PublicState:
    return PUBLIC[reply[2]]
