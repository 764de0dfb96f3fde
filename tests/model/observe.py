"""Reads everything the engine stores about the model's executions, and compares the two."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from flowfabric.core.contracts.executions import AttemptRecord, ExecutionInfo, ExecutionSnapshot
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.feeds import decode_entry
from tests.model.model import Model
from tests.model.parts import LEASED, Execution
from tests.support.state_rules import violations

_NO_INDEX = (":sigs", ":config", ":placed", "all_executions")
_LIVE_ATTEMPT = {"created", "started", "suspended"}


class Picture(NamedTuple):
    """All that reads say about one execution."""

    info: ExecutionInfo
    snapshot: ExecutionSnapshot | None
    attempts: list[AttemptRecord]
    result: bytes | None


class Observer:
    """Follows one partition. `epochs` remembers every lease ever seen, to prove they only rise."""

    def __init__(self, backend: ValkeyBackend, tag: str) -> None:
        self.backend = backend
        self.tag = tag
        self._events_from = "-"
        self._events: dict[str, list[str]] = {}
        self._epochs: dict[str, int] = {}

    async def compare(self, model: Model) -> None:
        """Fail where the engine and the model, or the engine and its own rules, disagree."""
        await self._read_events()
        indexes = await self._indexes()
        pictures = await asyncio.gather(*map(self._picture, model.executions))
        for held, picture in zip(model.executions.values(), pictures, strict=True):
            self._same(held, picture)
            self._same_lease(held, picture)
            assert indexes.pop(held.execution_id, {}) == held.indexes()
            assert self._events.get(held.execution_id, []) == held.events
            self._invariants(held, picture)
        assert indexes == {}, "an index holds an execution that is gone"

    async def _picture(self, execution_id: ExecutionId) -> Picture:
        backend = self.backend
        return Picture(
            *await asyncio.gather(
                backend.reads.read_execution_info(execution_id),
                backend.reads.describe_execution(execution_id),
                backend.reads.read_attempts(execution_id),
                backend.reads.get_execution_result(execution_id),
            )
        )

    def _same(self, held: Execution, picture: Picture) -> None:
        info, attempts = picture.info, picture.attempts
        assert picture.result == held.result
        assert info.state_vector == held.vector
        assert info.priority == held.priority
        assert (info.retry_count, info.lease_reclaim_count, info.replay_count) == (
            held.retries,
            held.reclaims,
            held.replays,
        )
        assert info.total_attempt_count == len(held.attempts)
        assert info.delay_until == held.delay_until
        assert info.progress_pct == held.progress
        completed = None if held.completed_at is None else str(held.completed_at)
        assert info.completed_at == completed
        assert [
            (item.attempt_id, item.attempt_type, item.attempt_state, item.lease_epoch)
            for item in attempts
        ] == [(item.attempt_id, item.kind, item.state, item.epoch) for item in held.attempts]

    def _same_lease(self, held: Execution, picture: Picture) -> None:
        assert picture.snapshot is not None
        lease = picture.snapshot.current_lease
        if held.phase != "active":
            assert lease is None
            return
        assert lease is not None
        assert (lease.lease_id, lease.lease_epoch) == (held.lease_id, held.epoch)
        assert (lease.worker_instance_id, lease.expires_at) == (held.worker, held.expires_at)

    def _invariants(self, held: Execution, picture: Picture) -> None:
        info, attempts = picture.info, picture.attempts
        vector = info.state_vector
        assert violations(vector) == []
        terminal = info.public_state.value in {"completed", "failed", "cancelled", "expired"}
        assert (info.completed_at is not None) == terminal
        delayed = vector.eligibility_state == "not_eligible_until_time"
        assert (info.delay_until is not None) == delayed
        live = [item for item in attempts if item.attempt_state in _LIVE_ATTEMPT]
        assert len(live) <= 1
        assert [item.attempt_index for item in attempts] == list(range(len(attempts)))
        assert all((item.ended_at is None) == (item in live) for item in attempts)
        epochs = [item.lease_epoch for item in attempts]
        assert epochs == sorted(set(epochs)), "two attempts share a lease epoch"
        assert held.epoch >= self._epochs.get(held.execution_id, 0)
        self._epochs[held.execution_id] = held.epoch
        if held.code == LEASED:
            assert held.epoch >= 1
        completions = self._events.get(held.execution_id, []).count("completion")
        assert completions == info.replay_count + (1 if terminal else 0)
        if held.policy.max_retries is not None:
            assert info.retry_count <= held.policy.max_retries

    async def _read_events(self) -> None:
        """Only what is new since the last look."""
        call = self.backend.transport.call
        entries: Any = await call("XRANGE", keys.events(self.tag), self._events_from, "+")
        partition = int(self.tag[4:-1])
        for entry, flat in entries:
            event = decode_entry(f"fp:{partition}", entry, flat)
            self._events.setdefault(event.execution_id, []).append(event.type)
            self._events_from = "(" + entry.decode()

    async def _indexes(self) -> dict[str, dict[str, float | None]]:
        """For each execution the indexes that hold it."""
        call = self.backend.transport.call
        prefix = f"ff:idx:{self.tag}:"
        names: Any = await call("KEYS", f"{prefix}*")
        suffixes = [
            name
            for name in (raw.decode().removeprefix(prefix) for raw in names)
            if not name.endswith(_NO_INDEX) and ":claimed:" not in name
        ]
        contents: list[Any] = await asyncio.gather(
            *(
                call("SMEMBERS", prefix + name)
                if name.startswith("worker:")
                else call("ZRANGE", prefix + name, 0, -1, "WITHSCORES")
                for name in suffixes
            )
        )
        found: dict[str, dict[str, float | None]] = {}
        for name, content in zip(suffixes, contents, strict=True):
            for item in content:
                member, score = (item, None) if name.startswith("worker:") else item
                found.setdefault(member.decode(), {})[name] = score
        return found
