"""A ring in a cluster wakes one idle listener that may take the work, whatever goes wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from flowfabric.core.capabilities import Offer
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.places import WorkPlace
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.library import ensure_library
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from flowfabric.valkey.address import Address, parse_url
from flowfabric.valkey.cluster import slot_of
from flowfabric.valkey.connection import dial
from tests.cluster.test_moved_slots import moved
from tests.sdk.test_doorbell import GPU, OFFERS
from tests.support.cluster import TestCluster
from tests.support.sdk import config, opener, serving, submit, until
from tests.support.server_time import ONCE_US

PARTITIONS = 12


async def connected(cluster: TestCluster) -> ValkeyBackend:
    return await ValkeyBackend.connect(
        parse_url(cluster.url), prepare_with=PartitionCounts(flow=PARTITIONS)
    )


@pytest.fixture
async def backend(cluster: TestCluster) -> AsyncIterator[ValkeyBackend]:
    for node in range(len(cluster.nodes)):
        await cluster.call(node, "FLUSHALL")
        await cluster.call(node, "FUNCTION", "FLUSH")
    async with await connected(cluster) as backend:
        await backend.meta.prepare()
        yield backend


class Sleepers:
    """Idle listeners of one process, each waiting until a ring wakes it."""

    def __init__(self, backend: ValkeyBackend) -> None:
        self._backend = backend
        self.bells: dict[str, Any] = {}
        self._waits: dict[str, asyncio.Task[list[WorkPlace]]] = {}

    async def add(self, name: str, lane: str = "default", offer: Offer | None = None) -> None:
        bell = self.bells[name] = self._backend.wakeups.listen([lane])
        bell.hear(offer or Offer(""))
        assert await bell.wait(0) == []
        await self.sleep(name)

    async def add_many(self, count: int) -> None:
        for number in range(count):
            await self.add(f"sleeper {number}")

    async def sleep(self, name: str) -> None:
        self._waits[name] = asyncio.create_task(self.bells[name].wait(60))
        await until(lambda: self.bells[name].listening, f"{name} asleep")

    async def stop_waiting(self, name: str) -> None:
        wait = self._waits.pop(name)
        wait.cancel()
        await asyncio.wait([wait])

    async def woken(self) -> dict[str, WorkPlace]:
        """Who woke, and by what; everything that was published so far has been heard."""
        for bell in self.bells.values():
            for primary in [*bell._primaries]:
                await primary.conn.call("PING")
        await asyncio.sleep(0)
        done = [name for name, wait in self._waits.items() if wait.done()]
        return {name: self._waits.pop(name).result()[0] for name in done}

    async def next(self) -> tuple[str, WorkPlace]:
        """The only one who wakes next, and by what."""
        async with asyncio.timeout(10):
            await asyncio.wait(self._waits.values(), return_when=asyncio.FIRST_COMPLETED)
        (one,) = (await self.woken()).items()
        return one

    async def aclose(self) -> None:
        for wait in self._waits.values():
            wait.cancel()
        for bell in self.bells.values():
            await bell.aclose()


@pytest.fixture
async def sleepers(backend: ValkeyBackend) -> AsyncIterator[Sleepers]:
    sleepers = Sleepers(backend)
    yield sleepers
    await sleepers.aclose()


async def rung(backend: ValkeyBackend, partition: int = 0, **fields: Any) -> WorkPlace:
    """One submission, which rings."""
    lane = fields.get("lane", "default")
    (execution_id,) = await submit(backend, partition=partition, **fields)
    return lane, execution_id.tag


async def calls_of(cluster: TestCluster, function: str) -> int:
    """How often clients called a function since the command logs were opened."""
    total = 0
    for node in range(len(cluster.nodes)):
        log = await cluster.call(node, "COMMANDLOG", "GET", -1, "slow")
        total += sum(entry[3][:2] == [b"FCALL", function.encode()] for entry in log)
    return total


async def log_calls(cluster: TestCluster) -> None:
    for node in range(len(cluster.nodes)):
        await cluster.call(node, "CONFIG", "SET", "commandlog-slow-execution-max-len", 10_000)
        await cluster.call(node, "CONFIG", "SET", "commandlog-execution-slower-than", 0)
        await cluster.call(node, "COMMANDLOG", "RESET", "slow")


async def test_one_submit_wakes_one_of_many(backend: ValkeyBackend, sleepers: Sleepers) -> None:
    await sleepers.add_many(10)
    place = await rung(backend)
    assert [*(await sleepers.woken()).values()] == [place]


async def test_so_many_submits_wake_so_many(backend: ValkeyBackend, sleepers: Sleepers) -> None:
    """Wherever they ring: one that two primaries wake passes a ring on."""
    await sleepers.add_many(6)
    places = [await rung(backend, partition) for partition in (0, 0, 1, 1, 2)]
    woken = list[WorkPlace]()
    while len(woken) < len(places):
        woken += (await sleepers.woken()).values()
    assert sorted(woken) == sorted(places)
    assert await sleepers.woken() == {}


async def test_those_who_offer_different_things_take_turns(
    backend: ValkeyBackend, sleepers: Sleepers
) -> None:
    for name, offer in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")):
        await sleepers.add(name, offer=Offer(offer))
    await rung(backend)
    await rung(backend)
    assert {name[0] for name in await sleepers.woken()} == {"a", "b"}


async def test_those_who_were_all_busy_are_woken_again(
    backend: ValkeyBackend, sleepers: Sleepers
) -> None:
    await sleepers.add("one")
    place = await rung(backend)
    assert await sleepers.next() == ("one", place)
    await rung(backend)
    assert await sleepers.bells["one"].wait(10) == [place]
    await sleepers.sleep("one")
    await rung(backend)
    assert await sleepers.next() == ("one", place)


async def test_one_submit_costs_one_claim(cluster: TestCluster, backend: ValkeyBackend) -> None:
    """Of eight idle workers, one claims."""
    done = asyncio.Event()

    async def work(_: ClaimedTask) -> None:
        done.set()

    settings = [
        config(claim_poll_interval_ms=3_600_000, worker_instance_id=f"w-{n}") for n in range(8)
    ]
    workers = [await Worker.connect(each, opener(cluster.url)) for each in settings]
    runs = [serving(worker, {"job": work}) for worker in workers]
    try:
        runtimes: list[Any] = [await run.__aenter__() for run in runs]
        bells = [runtime._claiming._doorbell for runtime in runtimes]

        async def all_asleep() -> bool:
            return all(bell.listening and not bell._passing for bell in bells)

        # The first wait only subscribes, and the workers look around after it.
        await until(all_asleep, "eight idle workers")
        await log_calls(cluster)
        await rung(backend)
        async with asyncio.timeout(10):
            await done.wait()
        await until(lambda: sum(r.summary.completed for r in runtimes) == 1, "the completion")
        await until(all_asleep, "eight idle workers")
        assert await calls_of(cluster, "ff_claim_many") == 1
        assert await calls_of(cluster, "ff_listen_here") <= 3
    finally:
        for run in runs:
            await run.__aexit__(None, None, None)
        for worker in workers:
            await worker.aclose()


@pytest.mark.parametrize("known", [True, False], ids=["known bell", "new bell"])
@pytest.mark.parametrize(
    ("fields", "heard_by"),
    [
        ({"policy": GPU}, {"gpu", "both"}),
        ({"policy": GPU, "namespace": "acme"}, {"acme"}),
        ({"namespace": "acme"}, {"acme", "all"}),
        ({}, {"plain", "gpu", "both", "all"}),
    ],
    ids=["gpu", "gpu in acme", "acme", "plain"],
)
async def test_only_those_wake_who_may_take_the_work(
    cluster: TestCluster,
    backend: ValkeyBackend,
    sleepers: Sleepers,
    fields: dict[str, Any],
    heard_by: set[str],
    *,
    known: bool,
) -> None:
    """One per ring, each in turn; a ring for nobody wakes nobody, not even to pass it on."""
    if known:
        await sleepers.add("first", offer=Offer("cuda,gpu", None))
        await rung(backend, **fields)
        assert (await sleepers.next())[0] == "first"
    for name, offer in OFFERS.items():
        await sleepers.add(name, offer=offer)
    await sleepers.add("elsewhere", lane="other")
    await log_calls(cluster)
    woken = set[str]()
    for _ in heard_by:
        place = await rung(backend, **fields)
        ((name, heard),) = (await sleepers.woken()).items()
        assert heard == place
        woken.add(name)
    assert woken == heard_by
    await rung(backend, **fields)
    assert await sleepers.woken() == {}
    assert await calls_of(cluster, "ff_ring_waiting") == 0


async def test_a_listener_that_offers_less_is_not_rung_for_the_rest(
    cluster: TestCluster, backend: ValkeyBackend, sleepers: Sleepers
) -> None:
    for number in range(6):
        name = f"changed {number}"
        await sleepers.add(name, offer=Offer("gpu", None))
        await sleepers.stop_waiting(name)
        sleepers.bells[name].hear(Offer("", None))
        await sleepers.sleep(name)
    await sleepers.add("able", offer=Offer("gpu", None))
    await log_calls(cluster)
    place = await rung(backend, policy=GPU)
    assert await sleepers.woken() == {"able": place}
    assert await calls_of(cluster, "ff_ring_waiting") == 0


async def test_a_ring_that_nobody_heard_waits_for_the_next(
    cluster: TestCluster, backend: ValkeyBackend, sleepers: Sleepers
) -> None:
    """The oldest first, one for each, and only for those who may take the work."""
    await log_calls(cluster)
    places = [await rung(backend, partition) for partition in (3, 3, 1, 2)]
    await rung(backend, policy=GPU)
    found: list[WorkPlace] = []
    for number in range(3):
        bell = sleepers.bells[f"{number}"] = backend.wakeups.listen(["default"])
        found += await bell.wait(10)
    assert sorted(found) == sorted({*places})
    await sleepers.add("idle")
    assert await sleepers.woken() == {}
    assert await calls_of(cluster, "ff_ring_waiting") == 0


async def test_rings_that_nobody_heard_are_heard_in_their_order(
    backend: ValkeyBackend, sleepers: Sleepers
) -> None:
    """Whatever their lanes are."""
    lanes = [f"lane-{number}" for number in range(8)]
    places = [await rung(backend, lane=lane) for lane in lanes]
    bell = sleepers.bells["one"] = backend.wakeups.listen(lanes)
    heard: list[WorkPlace] = []
    while len(heard) < len(places):
        heard += await bell.wait(10)
    assert heard == places


async def test_a_busy_listener_passes_rings_on(backend: ValkeyBackend, sleepers: Sleepers) -> None:
    """It registered when it was idle; a ring that reaches it now goes to an idle one."""
    await sleepers.add("busy")
    await sleepers.stop_waiting("busy")
    for partition in range(PARTITIONS):
        await sleepers.add(f"idle {partition}")
        place = await rung(backend, partition)
        name, heard = await sleepers.next()
        assert (name.startswith("idle"), heard) == (True, place)


async def test_rings_go_past_those_who_left(backend: ValkeyBackend, sleepers: Sleepers) -> None:
    """Without a word: their connections are gone."""
    await sleepers.add_many(3)
    await sleepers.add("alive")
    for number in range(3):
        for primary in [*sleepers.bells.pop(f"sleeper {number}")._primaries]:
            primary.conn.abort("killed")
    place = await rung(backend)
    assert await sleepers.next() == ("alive", place)


async def test_a_hung_listener_swallows_one_ring(
    cluster: TestCluster, backend: ValkeyBackend, sleepers: Sleepers
) -> None:
    """It is still connected. The next ring, of the scanner at the latest, wakes another."""
    tag = "{fp:0}"
    node = cluster.nodes[cluster.owner(slot_of(tag))]
    heard: list[Any] = []
    hung = await dial(Address(socket_path=str(node.socket_path)), on_push=heard.append)
    await hung.call("SSUBSCRIBE", keys.own_wake(tag, "hung"))
    await backend.calls.fcall("ff_listen_here", tag, ("hung", 60_000, "", "default"), op="listen")
    lane, _ = await rung(backend)
    await sleepers.add("alive")
    await hung.call("PING")
    await asyncio.sleep(0)
    assert [push[0] for push in heard if push[0] == b"smessage"] == [b"smessage"]
    assert await backend.wakeups.ring_waiting({tag: [lane]}) == 1
    assert await sleepers.next() == ("alive", (lane, tag))
    await hung.aclose()


async def test_a_replaced_library_learns_who_listens(
    cluster: TestCluster, backend: ValkeyBackend, sleepers: Sleepers
) -> None:
    """Its memory is empty: the first ring calls everyone to register, and wakes one."""
    await sleepers.add_many(4)
    for node in range(3):
        await cluster.call(node, "FUNCTION", "FLUSH")
    await ensure_library(backend.transport)
    for partition in (0, 1, 2, 0):
        place = await rung(backend, partition)
        assert (await sleepers.next())[1] == place


async def test_listeners_follow_a_moved_slot(
    cluster: TestCluster, backend: ValkeyBackend, sleepers: Sleepers
) -> None:
    """One that slept through the move wakes to look around, then hears the new primary."""
    await sleepers.add_many(2)
    names = [*sleepers.bells]
    async with moved(cluster, "{fp:0}"):
        for name in names:
            assert await sleepers._waits.pop(name) == []
            assert await sleepers.bells[name].wait(0) == []
            await sleepers.sleep(name)
        for _ in names:
            place = await rung(backend)
            assert (await sleepers.next())[1] == place


async def test_a_ring_during_a_move_waits_on_the_new_primary(
    cluster: TestCluster, backend: ValkeyBackend, sleepers: Sleepers
) -> None:
    bell = sleepers.bells["late"] = backend.wakeups.listen(["default"])
    await bell.wait(0)
    async with moved(cluster, "{fp:0}"):
        place = await rung(backend)
        heard: list[WorkPlace] = []
        async with asyncio.timeout(10):
            while not heard:
                heard = await bell.wait(1)
        assert heard == [place]


async def test_listeners_follow_a_failover() -> None:
    cluster = TestCluster()
    try:
        await cluster.form()
        replica = await cluster.add_replica(0)
        tag = next(f"{{fp:{n}}}" for n in range(9) if cluster.owner(slot_of(f"{{fp:{n}}}")) == 0)
        async with await connected(cluster) as backend:
            sleepers = Sleepers(backend)
            await sleepers.add_many(2)
            await cluster.call(replica, "CLUSTER", "FAILOVER")
            for name in [*sleepers.bells]:
                async with asyncio.timeout(20):
                    await asyncio.wait([sleepers._waits[name]])
                await listen_again(sleepers, name)
            for _ in range(2):
                place = await rung(backend, ExecutionId.parse(f"{tag}:{UUID}").partition)
                assert (await sleepers.next())[1] == place
            await sleepers.aclose()
    finally:
        cluster.stop()


UUID = "00000000-0000-4000-8000-000000000000"


async def listen_again(sleepers: Sleepers, name: str) -> None:
    """As workers do: whatever the doorbell raises, wait for it again."""
    while True:
        try:
            assert await sleepers.bells[name].wait(0) == []
            return await sleepers.sleep(name)
        except Exception:  # noqa: BLE001
            await asyncio.sleep(0.05)


async def commands(cluster: TestCluster) -> int:
    """What clients asked of all nodes, and what functions ran for them."""
    total = 0
    for node in range(3):
        stats: str = (await cluster.call(node, "INFO", "stats")).decode()
        total += int(stats.partition("total_commands_processed:")[2].split()[0])
    return total


async def test_an_idle_worker_costs_at_most_five_commands_a_second(
    cluster: TestCluster, backend: ValkeyBackend
) -> None:
    async with (
        await Worker.connect(config(), opener(cluster.url)) as worker,
        serving(worker, {"job": _nothing}) as runtime,
    ):
        claiming: Any = runtime._claiming
        await until(lambda: claiming._doorbell.listening, "an idle worker")
        lane = claiming._lanes["default"]
        before, started = await commands(cluster), time.monotonic()
        for _ in range(3):
            await until(_other(lane.swept_at, lambda: lane.swept_at), "a sweep")
        # Reading the counters takes two commands per node.
        used, seconds = await commands(cluster) - before - 6, time.monotonic() - started
    assert used / seconds <= 5.0, f"{used} commands in {seconds:.1f} s"


async def _nothing(_: ClaimedTask) -> None:
    pass


def _other(before: float, now: Callable[[], float]) -> Callable[[], bool]:
    return lambda: now() != before


async def test_who_is_gone_makes_room(backend: ValkeyBackend, sleepers: Sleepers) -> None:
    """The tables are bounded, and those who have not registered again leave them first."""
    names = [f"w{n}" for n in range(10_500)]
    for listener, offer in [*((name, "") for name in names), *((name, name) for name in names)]:
        args = (listener, 1, offer, "default")
        await backend.calls.fcall("ff_listen_here", "{fp:0}", args, op="listen")
    full_at = await backend.meta.server_time_ms()
    # A full table looks for room once per second.
    while await backend.meta.server_time_ms() <= full_at + 1000:
        pass
    await sleepers.add("alive")
    place = await rung(backend)
    assert await sleepers.next() == ("alive", place)


async def test_a_full_table_is_searched_for_room_in_a_short_call(
    cluster: TestCluster, backend: ValkeyBackend
) -> None:
    async def register(n: int) -> None:
        args = (f"w{n}", 60_000, "", f"lane-{n % 1000}")
        await backend.calls.fcall("ff_listen_here", "{fp:0}", args, op="listen")

    for n in range(10_000):
        await register(n)
    await log_calls(cluster)
    await register(10_000)
    node = cluster.owner(slot_of("{fp:0}"))
    log = await cluster.call(node, "COMMANDLOG", "GET", -1, "slow")
    # The table goes with the library.
    await cluster.call(node, "FUNCTION", "FLUSH")
    await ensure_library(backend.transport)
    (took,) = [entry[2] for entry in log if entry[3][:2] == [b"FCALL", b"ff_listen_here"]]
    assert took <= ONCE_US


async def test_rings_that_nobody_hears_are_forgotten(
    backend: ValkeyBackend, sleepers: Sleepers
) -> None:
    """All of them when they are too many, then new ones wait again; the scanner rings once more."""
    for number in range(1001):
        await rung(backend, lane=f"lane-{number}")
    for number, heard in ((1000, True), (999, False)):
        bell = sleepers.bells[f"{number}"] = backend.wakeups.listen([lane := f"lane-{number}"])
        assert await bell.wait(0) == ([(lane, "{fp:0}")] if heard else [])
    await sleepers.sleep("999")
    assert await backend.wakeups.ring_waiting({"{fp:0}": ["lane-999"]}) == 1
    assert await sleepers.next() == ("999", ("lane-999", "{fp:0}"))
