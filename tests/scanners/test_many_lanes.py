"""Very many lanes: no call of a scanner holds the server for long, and empty lanes go away."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.executions import Created, NewExecution
from flowfabric.core.errors import ConfigError, ValidationError
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.places import LaneSettings
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.keys import LANES_TAG, PLACES, wake
from flowfabric.engine.valkey.places import MAX_LANES
from flowfabric.engine.valkey.testing import EngineClock
from flowfabric.scanners import ScannerSupervisor
from flowfabric.scanners.settings import INTERVALS_S
from flowfabric.valkey.address import parse_url
from tests.support.engine import Engine
from tests.support.scanning import idle
from tests.support.server import TestServer

MANY = [f"lane-{number:05}" for number in range(MAX_LANES - 1)]
SLOW_US = 20_000
MINUTE_MS = 60_000


def one_of(lane: str, tag: str, delay_until: int | None = None) -> NewExecution:
    return NewExecution(
        execution_id=ExecutionId.parse(f"{tag}:{new_uuid()}"),
        execution_kind="job",
        lane_id=lane,
        delay_until=delay_until,
    )


async def slow_calls(backend: ValkeyBackend) -> list[str]:
    """What the slow log holds; it is empty afterwards."""
    entries: Any = await backend.transport.call("SLOWLOG", "GET", -1)
    await backend.transport.call("SLOWLOG", "RESET")
    return [f"{entry[2]} us: {b' '.join(entry[3][:2]).decode()}" for entry in entries]


async def calls_made(backend: ValkeyBackend) -> int:
    stats: Any = await backend.transport.call("INFO", "commandstats")
    return int(stats.decode().partition("cmdstat_fcall:calls=")[2].partition(",")[0])


async def slow_calls_of(
    scanner: str, supervisor: ScannerSupervisor, backend: ValkeyBackend
) -> list[str]:
    """The slow calls of a cycle if they are most of its calls: a busy machine stalls some."""
    slow: list[str] = []
    for _ in range(3):
        await slow_calls(backend)
        before = await calls_made(backend)
        assert (await supervisor.scan_once(scanner)).errors == 0
        made = await calls_made(backend) - before
        slow = [f"{scanner}: {call}" for call in await slow_calls(backend)]
        if len(slow) <= made // 2:
            return []
    return slow


@pytest.mark.timeout(120)
@pytest.mark.parametrize("partitions", [256, 1], ids=["spread", "crowded"])
async def test_no_call_is_slow(
    backend: ValkeyBackend, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    monkeypatch.setattr("flowfabric.scanners.index_reconciler._MAX_PER_CYCLE", 1000)
    later = await backend.meta.server_time_ms() + 1000
    new = [
        one_of(lane, f"{{fp:{number % partitions}}}", later if number % 2 else None)
        for number, lane in enumerate(MANY)
    ]
    assert all(
        isinstance(outcome, Created) for outcome in await backend.executions.create_many(new)
    )
    await EngineClock(backend).advance(2 * MINUTE_MS)
    supervisor = ScannerSupervisor(backend)
    await backend.transport.call(
        "CONFIG", "SET", "slowlog-log-slower-than", SLOW_US, "slowlog-max-len", 10_000
    )
    for scanner in INTERVALS_S:
        assert await slow_calls_of(scanner, supervisor, backend) == []
    # The next test prepares a deployment, which compares all lanes.
    await backend.transport.call("FLUSHALL")


async def test_a_lane_too_many_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.engine.valkey.places.MAX_LANES", 3)
    await engine.create(lane="a")
    new = [one_of(lane, "{fp:1}") for lane in ("b", "c", "a")]
    created, refused, again = await engine.backend.executions.create_many(new)
    assert isinstance(created, Created)
    assert isinstance(again, Created)
    assert isinstance(refused, ValidationError)
    assert (refused.code, refused.detail) == ("lane_limit_exceeded", "c: 3 lanes are in use")
    with pytest.raises(ValidationError, match="lane_limit_exceeded"):
        await engine.create(lane="c")
    with pytest.raises(ValidationError, match="lane_limit_exceeded"):
        await engine.backend.lanes.set_lane_state("c", "paused")
    assert (await engine.backend.lanes.list_lanes())[0] == ["a", "b", "default"]


async def test_many_names_are_registered_in_several_calls(engine: Engine) -> None:
    await engine.backend.places.register_places({"{fp:0}": MANY[:8500]})
    assert len(await engine.backend.places.lanes_in_use()) == 8501


# --- empty lanes ------------------------------------------------------------------------------


async def lanes_of(engine: Engine) -> list[str]:
    return (await engine.backend.lanes.list_lanes())[0]


async def sweep(engine: Engine) -> list[str]:
    """The lanes that are left."""
    await idle(engine).scan_once("retention_trimmer")
    return await lanes_of(engine)


async def test_an_empty_lane_leaves_the_registry(engine: Engine) -> None:
    once = await engine.create(lane="once", policy={"stream_policy": {"retention_ttl_ms": 1}})
    await engine.create(lane="used")
    await engine.backend.executions.cancel_execution(once)
    await engine.advance(MINUTE_MS + 1)
    # Its last execution is trimmed by the same pass.
    assert await sweep(engine) == ["default", "used"]
    call = engine.backend.transport.call
    assert await call("EXISTS", wake("once")) == 0
    assert await call("HEXISTS", PLACES, "* once") == 0


async def test_a_lane_that_holds_anything_stays(engine: Engine) -> None:
    await engine.create(lane="delayed", delay_until=await engine.now() + 3_600_000)
    await engine.create(
        lane="routed", policy={"routing_requirements": {"required_capabilities": ["gpu"]}}
    )
    await engine.running(lane="active")
    await engine.backend.executions.cancel_execution(await engine.create(lane="terminal"))
    kept = ["active", "default", "delayed", "routed", "terminal"]
    assert await lanes_of(engine) == kept
    await engine.advance(MINUTE_MS + 1)
    assert await sweep(engine) == kept


async def test_a_lane_that_somebody_registers_stays(
    engine: Engine, valkey: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker does with every heartbeat, and a submitter before it creates."""
    async with await ValkeyBackend.connect(parse_url(valkey.url)) as worker:
        await worker.places.register_places({"{fp:7}": ["served"]})
        await engine.advance(MINUTE_MS + 1)
        await worker.places.register_again()
        assert await sweep(engine) == ["default", "served"]
        # Registered between the look and the removal.
        places: Any = engine.backend.places
        stamp = (await places.places_in_use())["{fp:7}"]["served"]
        await engine.advance(MINUTE_MS + 1)
        await worker.places.register_again()
        args = ("7", "served", stamp)
        reply = await engine.backend.calls.fcall("ff_forget_places", LANES_TAG, args, op="test")
        assert reply[2] == 0
        await engine.advance(MINUTE_MS + 1)
        assert await sweep(engine) == ["default"]


async def test_a_lane_with_settings_stays(engine: Engine) -> None:
    await engine.backend.lanes.set_lane_state("paused", "paused")
    await engine.backend.places.register_places({"{fp:7}": ["paused"]})
    await engine.advance(MINUTE_MS + 1)
    assert await sweep(engine) == ["default", "paused"]


async def test_a_process_stops_registering_what_it_no_longer_uses(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = engine.backend
    await backend.places.register_places({"{fp:7}": ["once"]})
    for _ in range(2):
        # Longer than a process remembers.
        monkeypatch.setattr(backend.places, "_forget_at", None)
        await backend.places.register_again()
    await engine.advance(MINUTE_MS + 1)
    await backend.places.register_again()
    assert await sweep(engine) == ["default"]
    await backend.places.register_places({"{fp:7}": ["once"]})
    assert await lanes_of(engine) == ["default", "once"]


# --- declared lanes ---------------------------------------------------------------------------


async def test_declared_lanes_are_registered_and_stay(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FF_LANES", " mail, night shift ,")
    for _ in range(2):
        await engine.backend.meta.prepare()
    await engine.backend.places.register_places({"{fp:7}": ["mail"]})
    await engine.advance(MINUTE_MS + 1)
    assert await sweep(engine) == ["default", "mail", "night shift"]
    assert await engine.backend.lanes.read_settings(["mail"]) == [LaneSettings(lane_id="mail")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (" , ", "name at least one lane"),
        ("a,b, a", "a is listed more than once"),
        ("a,ü", "NonPrintable"),
        ("x" * 65, "TooLong"),
    ],
)
async def test_bad_declarations_are_refused_before_anything_is_dialled(
    monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    monkeypatch.setenv("FF_LANES", text)
    with pytest.raises(ConfigError, match=f"FF_LANES: .*{problem}"):
        await ValkeyBackend.connect(
            parse_url("valkey://127.0.0.1:1"), prepare_with=PartitionCounts()
        )
