"""`flowfabric workers` and `lanes`."""

from __future__ import annotations

from typing import Any

from flowfabric.core.text import iso
from tests.support.command import Cli
from tests.support.engine import Engine


async def register(engine: Engine, instance: str, *lanes: str, **more: Any) -> None:
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id=instance, lanes=lanes, **more
    )


def sharing(engine: Engine, count: int) -> list[str]:
    """Lanes with one home partition that is not the home of `mails`."""
    by_home: dict[int, list[str]] = {engine.new_id("mails").partition: []}
    for n in range(10_000):
        home = by_home.setdefault(engine.new_id(f"lane-{n}").partition, [])
        home.append(f"lane-{n}")
        if len(home) == count and home is not by_home[engine.new_id("mails").partition]:
            return home
    raise AssertionError("there are no such lanes")


async def test_workers(cli: Cli, engine: Engine) -> None:
    assert (await cli("workers")).out == "No worker is running.\n"
    await engine.freeze(await engine.now())
    await register(engine, "w-1", "default", "mails", capabilities=["gpu"], tasks=["resize"])
    await register(engine, "w-2", "default", namespace="other")
    done = await cli("workers")
    header, first, second = done.lines
    headings = "WORKER NAMESPACE STATE UP SEEN CAPABILITIES LANES TASKS"
    assert header.split() == headings.split()
    assert first.split()[:7] == ["w-1", "default", "active", "0s", "0s", "ago", "gpu"]
    assert first.split()[7:] == ["default,", "mails", "resize"]
    assert (await cli("workers", "--lane", "none")).out == "No matching worker is running.\n"
    assert second.split() == ["w-2", "other", "active", "0s", "0s", "ago", "-", "default", "-"]
    (only,) = (await cli("workers", "--lane", "mails", "--json")).objects
    assert (only["worker_instance_id"], only["lanes"]) == ("w-1", ["default", "mails"])
    assert only["registered_at_iso"] == iso(only["registered_at_ms"])
    assert only["last_heartbeat_iso"] == iso(only["last_heartbeat_ms"])
    assert (await cli("workers", "--namespace", "third", "--json")).out == ""


async def test_workers_show_the_namespaces_that_they_serve(cli: Cli, engine: Engine) -> None:
    await register(engine, "w-1", "default", namespaces=["*"])
    await register(engine, "w-2", "default", namespaces=["acme", "globex"])
    await register(engine, "w-3", "default", namespaces=["default"])
    _, first, second, third = (await cli("workers")).lines
    assert "default (serves all) " in first
    assert "default (serves acme, globex) " in second
    assert "serves" not in third


async def test_lanes(cli: Cli, engine: Engine) -> None:
    await engine.running()
    await engine.create()
    lost = await engine.running(lane="mails")
    await engine.backend.leases.revoke_lease(lost.execution_id)
    await engine.create(lane="mails")
    ended = await engine.create(lane="mails")
    await engine.backend.executions.cancel_execution(ended)
    await engine.backend.lanes.set_lane_state("mails", "paused", "maintenance")
    await register(engine, "w-1", "default")
    default, mails = (await cli("lanes", "--json")).objects
    assert 0 <= default.pop("oldest_ms") < 60_000
    assert default == {
        "lane": "default",
        "state": "active",
        "reason": "",
        "waiting": 1,
        "delayed": 0,
        "active": 1,
        "suspended": 0,
        "blocked": 0,
        "no_worker": 0,
        "finished": 0,
        "workers": 1,
    }
    assert (mails["waiting"], mails["active"]) == (2, 0)
    assert (mails["state"], mails["reason"], mails["finished"]) == ("paused", "maintenance", 1)
    assert mails["workers"] == 0
    header, *rows = (await cli("lanes")).lines
    assert header.split()[:4] == ["LANE", "STATE", "WAITING", "DELAYED"]
    assert [row.split()[0] for row in rows] == ["default", "mails"]
    assert "paused: maintenance" in rows[1]


async def test_the_busiest_partitions(cli: Cli, engine: Engine) -> None:
    nothing = "No partition holds waiting or running work.\n"
    assert (await cli("lanes", "--partitions")).out == nothing
    lanes = sharing(engine, 5)
    await engine.running(lane=lanes[0])
    for lane in (lanes[0], *lanes):
        await engine.create(lane=lane)
    elsewhere = await engine.create(lane="mails")
    busy, other = (await cli("lanes", "--partitions", "--json")).objects
    assert (busy["waiting"], busy["active"], len(busy["lanes"])) == (6, 1, 5)
    assert busy["lanes"][0] == {"lane": lanes[0], "waiting": 2, "active": 1}
    assert other == {
        "partition": elsewhere.partition,
        "waiting": 1,
        "active": 0,
        "lanes": [{"lane": "mails", "waiting": 1, "active": 0}],
    }
    header, *rows = (await cli("lanes", "--partitions")).lines
    assert header.split() == ["PARTITION", "WAITING", "ACTIVE", "LANES"]
    assert rows[0].split()[:5] == [str(busy["partition"]), "6", "1", lanes[0], "(3),"]
    assert rows[0].endswith(", 2 more")
    assert rows[1].split() == [str(elsewhere.partition), "1", "0", "mails", "(1)"]


async def test_a_lane_is_paused_resumed_drained_and_disabled(cli: Cli, engine: Engine) -> None:
    lane = engine.backend.lanes
    done = await cli("lane", "pause", "mails", "--reason", "provider is down")
    new = "Nothing has been submitted to it yet; check the name."
    assert done.out == f"Lane mails is paused; it was active. {new}\n"
    again = await cli("lane", "pause", "mails", "--reason", "provider is down")
    assert again.out == "Lane mails is paused; it was paused.\n"
    shown = await cli("lane", "show", "mails")
    assert shown.lines[0].split() == ["mails", "paused"]
    assert "provider is down" in shown.out
    assert (await cli("lane", "resume", "mails", "--json")).objects == [
        {"lane": "mails", "state": "active", "previous": "paused"}
    ]
    assert (await lane.get_lane("mails")).reason == ""
    await cli("lane", "drain", "mails")
    assert (await lane.get_lane("mails")).state == "draining"
    await cli("lane", "disable", "mails")
    assert (await lane.get_lane("mails")).state == "disabled"
    assert "a higher priority always starts first" in (await cli("lane", "show", "mails")).out
    failed = await cli("lane", "show", "nobody")
    assert failed.code == 1
    assert "lane_not_found" in failed.err


async def test_the_settings_of_a_lane(cli: Cli, engine: Engine) -> None:
    command = ("lane", "set", "mails", "--placement", "spread", "--shards", "8")
    more = ("--weight", "1m", "--grace", "5s", "--renewals")
    assert (await cli(*command, *more)).out == "Changed the settings of lane mails.\n"
    (lane,) = (await cli("lane", "show", "mails", "--json")).objects
    assert (lane["placement"], lane["shards"], lane["priority_weight_ms"]) == ("spread", 8, 60_000)
    assert (lane["reclaim_grace_ms"], lane["emit_renewals"]) == (5000, True)
    shown = (await cli("lane", "show", "mails")).out
    assert "spread over 8 partitions" in shown
    assert "one point is worth 1m of waiting" in shown
    for wrong in (("--placement", "anywhere"), ("--shards", "300"), ()):
        assert (await cli("lane", "set", "mails", *wrong)).code != 0


async def test_a_worker_is_drained(cli: Cli, engine: Engine) -> None:
    failed = await cli("drain-worker", "w-1")
    assert failed.code == 1
    assert "namespace default has no live worker w-1" in failed.err
    await register(engine, "w-1", "default")
    await engine.running()
    done = await cli("drain-worker", "w-1", "--timeout", "5m")
    assert done.out == "Worker w-1 gets no more work. It still runs 1 task.\n"
    (worker,) = (await cli("workers", "--json")).objects
    assert worker["draining"] is True
    assert " draining " in (await cli("workers")).lines[1]
    await register(engine, "idle", "default")
    idle = await cli("drain-worker", "idle")
    assert idle.out == "Worker idle gets no more work. It runs no task.\n"


async def test_without_data_there_are_none(cli: Cli) -> None:
    del cli.environment["FF_URL"]
    assert (await cli("lanes")).out == "No lanes yet.\n"
    nothing = "No partition holds waiting or running work.\n"
    assert (await cli("lanes", "--partitions")).out == nothing
    assert (await cli("workers")).out == "No worker is running.\n"
    assert not (cli.folder / ".flowfabric").exists()
