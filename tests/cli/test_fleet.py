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


async def test_workers(cli: Cli, engine: Engine) -> None:
    assert (await cli("workers")).out == "No worker is running.\n"
    await engine.freeze(await engine.now())
    await register(engine, "w-1", "default", "mails", capabilities=["gpu"], tasks=["resize"])
    await register(engine, "w-2", "default", namespace="other")
    done = await cli("workers")
    header, first, second = done.lines
    assert header.split() == ["WORKER", "NAMESPACE", "UP", "SEEN", "CAPABILITIES", "LANES", "TASKS"]
    assert first.split()[:6] == ["w-1", "default", "0s", "0s", "ago", "gpu"]
    assert first.split()[6:] == ["default,", "mails", "resize"]
    assert second.split() == ["w-2", "other", "0s", "0s", "ago", "-", "default", "-"]
    (only,) = (await cli("workers", "--lane", "mails", "--json")).objects
    assert (only["worker_instance_id"], only["lanes"]) == ("w-1", ["default", "mails"])
    assert only["registered_at_iso"] == iso(only["registered_at_ms"])
    assert only["last_heartbeat_iso"] == iso(only["last_heartbeat_ms"])
    assert (await cli("workers", "--namespace", "third", "--json")).out == ""


async def test_lanes(cli: Cli, engine: Engine) -> None:
    await engine.running()
    await engine.create()
    await engine.create(lane="mails")
    ended = await engine.create(lane="mails")
    await engine.backend.executions.cancel_execution(ended)
    await engine.backend.lanes.set_lane_state("mails", "paused", "maintenance")
    await register(engine, "w-1", "default")
    default, mails = (await cli("lanes", "--json")).objects
    assert default == {
        "lane": "default",
        "state": "active",
        "reason": "",
        "waiting": 1,
        "delayed": 0,
        "active": 1,
        "suspended": 0,
        "blocked": 0,
        "finished": 0,
        "workers": 1,
    }
    assert (mails["state"], mails["reason"], mails["finished"]) == ("paused", "maintenance", 1)
    assert mails["workers"] == 0
    header, *rows = (await cli("lanes")).lines
    assert header.split()[:4] == ["LANE", "STATE", "WAITING", "DELAYED"]
    assert [row.split()[0] for row in rows] == ["default", "mails"]
    assert "paused: maintenance" in rows[1]


async def test_without_data_there_are_none(cli: Cli) -> None:
    del cli.environment["FF_URL"]
    assert (await cli("lanes")).out == "No lanes yet.\n"
    assert (await cli("workers")).out == "No worker is running.\n"
    assert not (cli.folder / ".flowfabric").exists()
