"""Random lives of streams against a small model, with every invariant checked after each step."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import BestEffort, Frame
from flowfabric.core.merge_patch import merge
from tests.support.engine import TTL, Engine, unchanged
from tests.support.executions import BACKOFF, POLICY, promote
from tests.support.storage import expiry, meta
from tests.support.streams import frames, holder

STEPS = 60
REFUSALS = {"stream_closed", "stale_owner_cannot_append"}


class Attempt:
    """What the model knows of one attempt's stream."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.appended: list[tuple[str, bytes]] = []
        self.patches: list[bytes] = []
        self.stays = False
        self.last_seq = -1
        self.closed: str | None = None


class Life:
    """One execution and the attempts it had."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine = engine
        self.rng = rng
        self.attempts: list[Attempt] = []

    @property
    def current(self) -> Attempt:
        return self.attempts[-1]

    async def start(self) -> None:
        retries = POLICY["retry_policy"] | {"max_retries": STEPS}
        policy = {"retry_policy": retries, "max_replay_count": STEPS}
        self.attempts.append(Attempt(await self.engine.running(policy=policy)))

    async def append(self) -> None:
        attempt, rng = self.current, self.rng
        mode: Any = rng.choice(["durable", "durable", "summary", "best_effort"])
        batch = self._batch(mode)
        seq = rng.choice([None, attempt.last_seq + 1, attempt.last_seq, attempt.last_seq - 1])
        if seq is not None and seq < 0:
            seq = None
        outcome = await self.engine.backend.streams.append_frames(
            attempt.handle,
            batch,
            mode=mode,
            seq=seq,
            retention_maxlen=rng.choice([None, 0, 100_000]),
            best_effort=BestEffort(ttl_ms=rng.choice([0, 60_000]), maxlen_floor=10_000),
        )
        repeated = seq is not None and seq <= attempt.last_seq
        assert outcome.duplicate is repeated
        if not repeated:
            assert len(outcome.stream_ids) == len(batch)
            attempt.appended += [
                (entry, frame.payload)
                for entry, frame in zip(outcome.stream_ids, batch, strict=True)
            ]
            if mode == "summary":
                attempt.patches += [frame.payload for frame in batch]
                assert outcome.summary_version == len(attempt.patches)
            attempt.stays = attempt.stays or mode != "best_effort"
            if seq is not None:
                attempt.last_seq = seq
        assert outcome.frame_count == len(attempt.appended)

    def _batch(self, mode: str) -> list[Frame]:
        count = self.rng.choice([1, 1, 3, 7])
        if mode == "summary":
            keys = "abc"
            return frames(
                *(
                    json.dumps({self.rng.choice(keys): self.rng.choice([None, 1, {"x": 2}, [3]])})
                    for _ in range(count)
                )
            )
        return frames(*(self.rng.randbytes(self.rng.randrange(20)) for _ in range(count)))

    async def refused(self) -> None:
        """Somebody who does not hold the lease, or a patch that is none."""
        handle, backend = self.current.handle, self.engine.backend
        strangers = [holder(handle, epoch=99), holder(handle, index=77)]
        strangers += [attempt.handle for attempt in self.attempts[:-1]]
        stranger = self.rng.choice(strangers)
        error = await unchanged(
            self.engine, lambda: backend.streams.append_frames(stranger, frames("no"))
        )
        assert error.code in REFUSALS
        error = await unchanged(
            self.engine, lambda: backend.streams.append_frames(handle, frames("[]"), mode="summary")
        )
        assert error.code == "invalid_input"

    async def pause(self) -> None:
        """The attempt goes on under a new lease."""
        engine, attempt = self.engine, self.current
        await engine.backend.executions.delay(attempt.handle, 1)
        error = await unchanged(
            engine, lambda: engine.backend.streams.append_frames(attempt.handle, frames("no"))
        )
        assert error.code == "stream_closed"
        attempt.handle = (await engine.claim()).handle

    async def end(self) -> None:
        """The attempt ends and the next one begins."""
        engine, attempt = self.engine, self.current
        backend, execution_id = engine.backend, attempt.handle.execution_id
        match self.rng.choice(["retry", "reclaim", "replay"]):
            case "retry":
                await backend.executions.fail(attempt.handle, "x", "transient")
                attempt.closed = "attempt_failure"
                await engine.advance(BACKOFF)
                await promote(engine, execution_id)
            case "reclaim":
                await engine.advance(TTL)
                await backend.upkeep.mark_lease_expired_if_due(execution_id.tag, [execution_id])
                attempt.closed = "reclaimed"
            case _:
                await backend.executions.complete(attempt.handle)
                attempt.closed = "attempt_success"
                await backend.executions.replay_execution(execution_id)
        self.attempts.append(Attempt((await engine.claim()).handle))

    async def check(self) -> None:
        for attempt in self.attempts:
            await self._check(attempt)

    async def _check(self, attempt: Attempt) -> None:
        backend, handle = self.engine.backend, attempt.handle
        page = await backend.streams.read_stream(
            handle.execution_id, handle.attempt_index, count_limit=10_000
        )
        assert [(frame.id, frame.payload) for frame in page.frames] == attempt.appended
        order = [tuple(map(int, entry.split("-"))) for entry, _ in attempt.appended]
        assert order == sorted(set(order))
        assert page.closed_reason == attempt.closed
        assert page.is_closed is (attempt.closed is not None)
        assert not page.truncated
        stored = await meta(self.engine, handle)
        assert ("closed_at" in stored) is ("closed_reason" in stored)
        summary = await backend.streams.read_summary(handle.execution_id, handle.attempt_index)
        if not attempt.appended:
            assert stored == {}
            assert summary is None
            return
        assert int(stored["frame_count"]) == len(attempt.appended)
        assert int(stored["total_bytes"]) == sum(len(payload) for _, payload in attempt.appended)
        assert stored["last_sequence"] == attempt.appended[-1][0]
        if attempt.stays:
            assert await expiry(self.engine, handle) == -1
        if summary is None:
            assert attempt.patches == []
            return
        assert summary.version == len(attempt.patches)
        assert summary.document_json == merge(b"{}", *(json.loads(p) for p in attempt.patches))


SEEDS = [int(s) for s in os.environ.get("FF_STREAM_SEEDS", "1,2,3,4").split(",")]


@pytest.mark.parametrize("seed", SEEDS)
async def test_invariants_over_random_lives(engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    life = Life(engine, rng)
    await life.start()
    for step in range(STEPS):
        names = ["append"] * 6 + ["refused", "pause", "end"]
        name = rng.choice(names)
        await getattr(life, name)()
        try:
            await life.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {step} ({name}): {error}") from error
    assert len(life.attempts) > 1
