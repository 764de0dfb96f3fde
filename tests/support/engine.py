"""Shorthands for engine tests: make, claim, move the clock, look at everything stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts.executions import Created, NewExecution
from flowfabric.core.contracts.leases import Claim, Handle
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.core.policy import parse_policy
from flowfabric.core.state import StateVector
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.events import Event
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.feeds import decode_entry
from flowfabric.engine.valkey.testing import EngineClock
from flowfabric.valkey.address import parse_url

LANE = "default"
TTL = 30_000

_DIGEST = """
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  if redis.call('PTTL', key) == -1 then
    found[#found + 1] = key
    found[#found + 1] = redis.sha1hex(redis.call('DUMP', key))
  end
end
return found
"""


@asynccontextmanager
async def prepared_backend(
    url: str, counts: PartitionCounts | None = None
) -> AsyncGenerator[ValkeyBackend]:
    """On an emptied keyspace, with the test clock at the server's time."""
    async with await ValkeyBackend.connect(
        parse_url(url), prepare_with=counts or PartitionCounts()
    ) as backend:
        await backend.transport.call("FLUSHALL")
        await backend.meta.prepare()
        await EngineClock(backend).reset()
        # An earlier test may have allowed its calls less.
        await backend.calls.fcall("ff_test_units", "{fp:0}", (128,), op="test")
        yield backend


class Engine:
    """One engine under test."""

    def __init__(self, backend: ValkeyBackend) -> None:
        self.backend = backend
        self._clock = EngineClock(backend)

    def new_id(self, lane: str = LANE) -> ExecutionId:
        return ExecutionId.solo(lane, self.backend.counts)

    async def create(
        self,
        *,
        lane: str = LANE,
        policy: Mapping[str, Any] | None = None,
        execution_id: ExecutionId | None = None,
        **fields: Any,
    ) -> ExecutionId:
        """Create one execution and return its id."""
        outcome = await self.backend.executions.create_execution(
            NewExecution(
                execution_id=execution_id or self.new_id(lane),
                execution_kind=fields.pop("execution_kind", "job"),
                lane_id=lane,
                policy=None if policy is None else parse_policy(dict(policy)),
                **fields,
            )
        )
        assert isinstance(outcome, Created)
        return outcome.execution_id

    def want(
        self,
        *,
        lane: str = LANE,
        worker: str = "w",
        instance: str = "w-1",
        capabilities: Iterable[str] = (),
        tasks: Iterable[str] | None = None,
        namespaces: Iterable[str] | None = None,
        ttl: int = TTL,
    ) -> ClaimRequest:
        """With `tasks`, the worker leaves all others to workers that know them."""
        known = caps.normalise(list(capabilities), "worker")
        csv = caps.offered_csv(known, tasks or (), no_others=tasks is not None)
        spaces = None if namespaces is None else tuple(namespaces)
        return ClaimRequest(
            *(lane, worker, instance), capabilities=csv, lease_ttl_ms=ttl, namespaces=spaces
        )

    async def claim_all(self, max_n: int = 100, *, lane: str = LANE, **want: Any) -> list[Claim]:
        """Claim from the lane's own partition."""
        tag = self.new_id(lane).tag
        claimed = await self.backend.claims.claim_many(self.want(lane=lane, **want), tag, max_n)
        return claimed.claims

    async def claim(self, **want: Any) -> Claim:
        """Claim exactly one."""
        (claim,) = await self.claim_all(1, **want)
        return claim

    async def running(self, **create: Any) -> Handle:
        """Create one execution and claim it."""
        await self.create(**create)
        lane = create.get("lane", LANE)
        return (await self.claim(lane=lane)).handle

    async def advance(self, ms: int) -> None:
        """Move the engine's clock forward (backward when negative)."""
        await self._clock.advance(ms)

    async def freeze(self, at: int) -> None:
        """Stop the engine's clock at this millisecond; `advance` starts it again."""
        await self._clock.freeze(at)

    async def block(self, execution_id: ExecutionId) -> None:
        """Give the execution an open dependency, as a flow would."""
        key = keys.core(execution_id.tag, execution_id)
        await self.backend.transport.call("HSET", key, "deps", "1 0 0 0 p")

    async def unblock(self, execution_id: ExecutionId) -> None:
        """Take the dependency away again."""
        key = keys.core(execution_id.tag, execution_id)
        await self.backend.transport.call("HDEL", key, "deps")

    async def now(self) -> int:
        return await self.backend.meta.server_time_ms()

    async def vector(self, execution_id: ExecutionId) -> StateVector:
        return (await self.backend.reads.read_execution_info(execution_id)).state_vector

    async def events(self, execution_id: ExecutionId) -> list[Event]:
        """Everything the partition's feed says of one execution, in order."""
        entries: Any = await self.backend.transport.call(
            "XRANGE", keys.events(execution_id.tag), "-", "+"
        )
        decoded = [decode_entry(execution_id.tag[1:-1], entry, flat) for entry, flat in entries]
        return [event for event in decoded if event.execution_id == execution_id]

    async def trim_feed(self, execution_id: ExecutionId) -> None:
        """Trim everything that the feed of this execution's partition holds now."""
        await self.backend.upkeep.trim_events(execution_id.tag, 2**45)

    async def digest(self) -> dict[bytes, bytes]:
        """Every key that stays, with a hash of its content: `dump` in short, in one round trip."""
        flat: Any = await self.backend.transport.call("EVAL", _DIGEST, 0)
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def dump(self) -> dict[bytes, Any]:
        """Every key with its full content, to compare before and after."""
        call = self.backend.transport.call
        names: Any = await call("KEYS", "*")
        dumped: dict[bytes, Any] = {}
        for name in sorted(names):
            kind: Any = await call("TYPE", name)
            dumped[name] = await _content(call, name, kind.decode())
        return dumped


async def _content(call: Any, name: bytes, kind: str) -> Any:
    match kind:
        case "hash":
            return dict(sorted((await call("HGETALL", name)).items()))
        case "string":
            return await call("GET", name)
        case "set":
            return sorted(await call("SMEMBERS", name))
        case "zset":
            return await call("ZRANGE", name, 0, -1, "WITHSCORES")
        case "list":
            return await call("LRANGE", name, 0, -1)
        case _:
            return await call("XRANGE", name, "-", "+")


async def refused(call: Awaitable[Any], code: str) -> EngineError:
    """The typed error a call was refused with; its code must be this one."""
    with pytest.raises(EngineError) as caught:
        await call
    assert caught.value.code == code, str(caught.value)
    return caught.value


async def unchanged(engine: Engine, call: Callable[[], Awaitable[Any]]) -> Any:
    """Runs a call that must leave every key as it was; its answer, or the error it raised."""
    before = await engine.dump()
    try:
        answer: Any = await call()
    except EngineError as error:
        answer = error
    assert await engine.dump() == before
    return answer


@asynccontextmanager
async def untouched(engine: Engine) -> AsyncGenerator[None]:
    """Whatever happens inside changes no key."""
    before = await engine.dump()
    yield
    after = await engine.dump()
    changed = {
        name: (before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    }
    assert not changed, changed
