"""What every function of the library builds on: scopes, joined index writes, lane settings."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import pytest

from flowfabric.engine.valkey import library
from tests.support.engine import Engine
from tests.valkey.mutation import private_engine, private_server

__all__ = ["private_engine", "private_server"]

TAG = "{fp:0}"


@pytest.mark.corrupts
@pytest.mark.parametrize(
    ("writes", "members"),
    [
        (["zrem a", "zadd 1 a", "zrem a"], {}),
        (["zadd 1 a", "zrem a", "zadd 2 a"], {b"a": 2.0}),
        (["zadd 1 a", "zadd 1 b", "zrem a", "zadd 3 a", "zrem b"], {b"a": 3.0}),
        (["zadd 1 a", "zadd 2 a"], {b"a": 2.0}),
    ],
)
async def test_joined_writes_keep_their_order(
    engine: Engine, writes: list[str], members: dict[bytes, float]
) -> None:
    await engine.backend.calls.fcall("ff_test_joined", TAG, writes, op="test")
    found: Any = await engine.backend.transport.call(
        "ZRANGE", f"ff:idx:{TAG}:joined", 0, -1, "WITHSCORES"
    )
    assert dict(found) == members


@pytest.mark.corrupts
async def test_joined_writes_to_a_set_keep_their_order(engine: Engine) -> None:
    writes = ["srem a", "sadd a", "srem a", "sadd b", "srem b", "sadd b"]
    await engine.backend.calls.fcall("ff_test_joined", TAG, writes, op="test")
    assert await engine.backend.transport.call("SMEMBERS", f"ff:idx:{TAG}:joined") == [b"b"]


async def test_a_batch_reads_the_settings_of_each_lane_once(engine: Engine) -> None:
    call = engine.backend.transport.call
    for lane in ("left", "right"):
        await engine.backend.calls.fcall(
            "ff_set_lane", TAG, (lane, 1, 1, "priority_weight_ms", 5), op="test"
        )
    await call("CONFIG", "RESETSTAT")
    items: list[Any] = [""]
    for number in range(10):
        execution_id = f"{TAG}:00000000-0000-4000-8000-{number:012d}"
        options = b"\x82\xa4lane" + (b"\xa4left" if number % 2 else b"\xa5right") + b"\xa4prio\x01"
        items += (execution_id, "job", "", "", options)
    await engine.backend.calls.fcall("ff_create", TAG, items, op="test")
    stats: Any = await call("INFO", "commandstats")
    assert re.findall(rb"cmdstat_hmget:calls=(\d+)", stats) == [b"2"]


async def test_a_helper_file_shares_only_its_module(private_engine: Engine) -> None:
    helpers = files("flowfabric") / "lua" / "lib"
    declared = re.compile(r"^local (?:function )?(\w+(?:, \w+)*)", re.MULTILINE)
    private = {
        name
        for path in helpers.iterdir()
        if path.name.endswith(".lua") and not path.name.startswith("00_")
        for found in declared.findall(path.read_text(encoding="utf-8"))
        for name in found.split(", ")
    }
    probes = ", ".join(f"{name} = function() return {name} end" for name in sorted(private))
    code = library._assemble(cluster=False, events_maxlen=10_000)
    code += f"""
local probes = {{ {probes} }}
server.register_function('probe', function()
  local seen = {{}}
  for name, probe in pairs(probes) do
    if pcall(probe) then seen[#seen + 1] = name end
  end
  return seen
end)"""
    call = private_engine.backend.transport.call
    await call("FUNCTION", "LOAD", "REPLACE", code)
    assert await call("FCALL", "probe", 0) == []


def test_one_way_to_change_a_state() -> None:
    """`record.transition` writes states, named predicates read them; a new record starts in one."""
    writes = re.compile(r"rec\.state(?:, [\w.]+)* = |'HSET', K\.core\([^)]*\), 'state'")
    compares = re.compile(r"S\.\w+\([^)]*\) [=~]= '|(?:phase|ownership|eligibility) [=~]= '")
    found: list[str] = []
    for folder in ("lib", "functions"):
        for path in (files("flowfabric") / "lua" / folder).iterdir():
            if path.name in {"50_record.lua", "91_creating.lua"}:
                continue
            text = path.read_text(encoding="utf-8")
            found += [
                f"{path.name}: {said}" for said in writes.findall(text) + compares.findall(text)
            ]
    assert found == []
